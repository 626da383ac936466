"""Probes played against the model of an engine token by token: observations whose costs are known."""

import random
from collections.abc import Iterable

from msgspec import Struct

from inferry.loadgen.probes import INJECTED_OUTPUT, SETTLED_TOKENS, Probe
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.observations import CallTiming, Flag, Observation
from inferry.sim.sequence import EngineSequence, FirstTokenEvent

INF = float("inf")


class Request(Struct, frozen=True):
    at: float
    prompt: int
    output: int
    prefix: int | None = None


def given(flags: EngineFlags) -> dict[str, Flag]:
    names = ("max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_tokens")
    return {name: Flag(getattr(flags, name), "given") for name in names}


def simulate_observations(
    probes: Iterable[Probe], costs: CostModel, flags: EngineFlags, *, noise: float = 0.0, seed: int = 7
) -> list[Observation]:
    """What a client of such an engine would see. With noise, a probe takes up to so much more or less, and one in
    twelve half as long again."""
    draw = random.Random(seed)
    seen = []
    for probe in probes:
        calls = _calls(probe, costs, flags, draw)
        factor = (1.5 if noise and draw.random() < 1 / 12 else 1.0) * (1 + noise * draw.uniform(-1, 1))
        slowed = tuple(_slower(call, factor) for call in calls)
        seen.append(Observation(kind=probe.kind, held_out=probe.held_out, calls=slowed))
    return seen


def _calls(probe: Probe, costs: CostModel, flags: EngineFlags, draw: random.Random) -> list[CallTiming]:
    if probe.kind == "hit":
        requests = []
        at = 0.0
        for _ in range(3):
            requests.append(Request(at, probe.prompt_tokens, probe.output_tokens, prefix=0))
            at = token_times(requests, costs, flags)[-1].ended_s + 1e-4
        return token_times(requests, costs, flags)
    requests = [Request(i * 20e-6, probe.prompt_tokens, probe.output_tokens) for i in range(probe.sequences)]
    calls = token_times(requests, costs, flags)
    settled = 0.0
    for tokens in probe.injected:
        base_calls = calls[: probe.sequences]
        step_s = base_calls[0].heard_s[-1] - base_calls[0].heard_s[-2]
        after = [[at for at in call.heard_s if at > settled][:SETTLED_TOKENS] for call in base_calls]
        if any(len(times_heard) < SETTLED_TOKENS for times_heard in after):
            break
        requests.append(
            Request(max(times_heard[-1] for times_heard in after) + draw.random() * step_s, tokens, INJECTED_OUTPUT)
        )
        calls = token_times(requests, costs, flags)
        settled = calls[-1].ended_s
    return calls


def token_times(requests: list[Request], costs: CostModel, flags: EngineFlags) -> list[CallTiming]:
    """Every token of every answer. Those of one step are heard one after the other, on average when the model says."""
    engine = Engine(costs, flags, fast_forward=False)
    arrivals = sorted(range(len(requests)), key=lambda number: -requests[number].at)
    entries: list[tuple[float, int]] = []
    decoding: dict[int, None] = {}
    times_heard: list[list[float]] = [[] for _ in requests]
    while arrivals or entries or engine.next_at is not None:
        step_at = engine.next_at if engine.next_at is not None else INF
        arrival_at = requests[arrivals[-1]].at if arrivals else INF
        entry_at = entries[0][0] if entries else INF
        if arrival_at <= min(step_at, entry_at):
            number = arrivals.pop()
            entries.append((engine.receive(requests[number].prompt, arrival_at), number))
        elif entry_at <= step_at:
            _, number = entries.pop(0)
            engine.submit(_sequence(requests[number], number, flags), entry_at)
        else:
            happened = engine.advance(step_at)
            for one in happened:
                if isinstance(one, FirstTokenEvent):
                    decoding[_number(one.sequence)] = None
            begin = step_at + engine.server.delay_s(step_at) + costs.reply_s
            for place, number in enumerate(decoding):
                times_heard[number].append(begin + (place + 0.5) * costs.token_s)
            for one in happened:
                if not isinstance(one, FirstTokenEvent):
                    del decoding[_number(one.sequence)]
    return [
        CallTiming(
            sent_s=request.at,
            heard_s=tuple(times),
            ended_s=times[-1],
            prompt_tokens=request.prompt,
            output_tokens=request.output,
            prefix=request.prefix,
        )
        for request, times in zip(requests, times_heard, strict=True)
    ]


def _sequence(request: Request, number: int, flags: EngineFlags) -> EngineSequence:
    blocks = tuple(range(request.prompt // flags.block_tokens)) if request.prefix is not None else ()
    return EngineSequence(str(number), request.prompt, request.output, blocks=blocks, tag=number)


def _number(sequence: EngineSequence) -> int:
    assert isinstance(sequence.tag, int)
    return sequence.tag


def _slower(call: CallTiming, factor: float) -> CallTiming:
    return CallTiming(
        sent_s=call.sent_s * factor,
        heard_s=tuple(at * factor for at in call.heard_s),
        ended_s=call.ended_s * factor,
        prompt_tokens=call.prompt_tokens,
        output_tokens=call.output_tokens,
        prefix=call.prefix,
    )
