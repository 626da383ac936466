"""A probe played against the simulated engine: what its client would have observed."""

import statistics
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from msgspec import Struct

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.observations import CallTiming, Observation
from inferry.sim.sequence import EngineSequence, FirstTokenEvent

Figures = dict[str, float]
ENGINE_DECODE = "vllm:request_decode_time_seconds_sum"
ENGINE_WAITS = ("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum")


class ReplayedCall(Struct, frozen=True):
    """When a call was sent and answered, and when it entered and left the engine."""

    sent_s: float
    first_s: float
    ended_s: float
    entered_s: float
    engine_first_s: float
    engine_ended_s: float


def replay(calls: Sequence[CallTiming], costs: CostModel, flags: EngineFlags) -> list[ReplayedCall]:
    """The same requests at the same times, in the order given."""
    engine = Engine(costs, flags)
    # In the server process: time, call, and remaining turns.
    turns = [(call.sent_s, number, costs.request_turns) for number, call in enumerate(calls)]
    heapify(turns)
    entered = [0.0] * len(calls)
    first = [0.0] * len(calls)
    ended = [0.0] * len(calls)
    sequences: list[EngineSequence | None] = [None] * len(calls)
    while turns or engine.next_at is not None:
        step_at = engine.next_at if engine.next_at is not None else inf
        if turns and turns[0][0] <= step_at:
            now, number, turns_left = heappop(turns)
            if turns_left:
                heappush(turns, (engine.receive(calls[number].prompt_tokens, now), number, turns_left - 1))
                continue
            entered[number] = now
            entering = sequences[number] = _sequence(calls[number], number, flags)
            engine.submit(entering, now)
        else:
            for event in engine.advance(step_at):
                tag = event.sequence.tag
                assert isinstance(tag, int)
                (first if isinstance(event, FirstTokenEvent) else ended)[tag] = event.delivered_at
    replayed = []
    for number, (call, sequence) in enumerate(zip(calls, sequences, strict=True)):
        assert sequence is not None
        assert sequence.first_at is not None
        assert sequence.ended_at is not None
        replayed.append(
            ReplayedCall(
                call.sent_s, first[number], ended[number], entered[number], sequence.first_at, sequence.ended_at
            )
        )
    return replayed


def _sequence(call: CallTiming, number: int, flags: EngineFlags) -> EngineSequence:
    blocks: tuple[int, ...] = ()
    if call.prefix is not None and flags.prefix_caching:
        blocks = tuple(hash((call.prefix, i)) for i in range(call.prompt_tokens // flags.block_tokens))
    return EngineSequence(str(number), call.prompt_tokens, call.output_tokens, blocks=blocks, tag=number)


def measured(observation: Observation) -> Figures:
    """Figures of a probe as the client saw it; `engine_` figures where the engine reported its own times."""
    calls = observation.calls
    figures = _first_token_figures(observation, [call.first_s for call in calls])
    if observation.kind != "hit":  # its calls are sequential, and the model's may overlap
        figures |= {"total": observation.total_s}
        figures |= _itl_figures(observation, [call.ended_s - call.heard_s[0] for call in calls])
    engine_times = observation.engine
    later = sum(call.output_tokens - 1 for call in calls)
    if engine_times.get(ENGINE_DECODE) and later:
        figures["engine_itl"] = engine_times[ENGINE_DECODE] / later
    if all(name in engine_times for name in ENGINE_WAITS[1:]):
        figures["engine_first"] = sum(engine_times.get(name, 0.0) for name in ENGINE_WAITS) / len(calls)
    return {name: value for name, value in figures.items() if value > 0}


def predicted(observation: Observation, costs: CostModel, flags: EngineFlags) -> Figures:
    """The same figures as the simulated engine has them."""
    calls = observation.calls
    replayed = replay(calls, costs, flags)
    figures = {"total": max(one.ended_s for one in replayed) - min(one.sent_s for one in replayed)}
    figures |= _first_token_figures(observation, [one.first_s - one.sent_s for one in replayed])
    figures |= _itl_figures(observation, [one.ended_s - one.first_s for one in replayed])
    later = sum(call.output_tokens - 1 for call in calls)
    if later:
        figures["engine_itl"] = sum(one.engine_ended_s - one.engine_first_s for one in replayed) / later
    figures["engine_first"] = sum(one.engine_first_s - one.entered_s for one in replayed) / len(replayed)
    return figures


def _first_token_figures(observation: Observation, firsts: Sequence[float]) -> Figures:
    """The calls to evaluate: the injected prompts of an inject probe, the repeated ones of a hit probe."""
    calls = observation.calls
    match observation.kind:
        case "inject":
            batch_started_s = min(call.heard_s[0] for call in calls)
            late = [first for call, first in zip(calls, firsts, strict=True) if call.sent_s > batch_started_s]
            return {"first": statistics.fmean(late)} if late else {}
        case "hit":
            return {"first": firsts[0], "hit_first": statistics.fmean(firsts[1:])}
        case _:
            return {"first": statistics.median(firsts)}


def _itl_figures(observation: Observation, spans: Sequence[float]) -> Figures:
    itls = [
        span / (call.output_tokens - 1)
        for call, span in zip(observation.calls, spans, strict=True)
        if call.output_tokens >= 4
    ]
    return {"itl": statistics.median(itls)} if itls else {}
