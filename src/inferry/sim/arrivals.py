"""Where work comes from: made-up arrivals by seed, and recorded traces in four formats.

A trace says when calls came and how long they were; where it also says which prompts begin alike, that is kept. Calls
of a session are one run: its steps follow one another, however long the engines take.
"""

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from inferry.domain.jobs import Lane
from inferry.sim.calls import Run, Step
from inferry.sim.draws import stream
from inferry.sim.prompts import Piece

Lengths = Callable[[Random], tuple[int, int]]
"""Draws the prompt and output tokens of a call."""

_MOONCAKE_BLOCK = 512
_CODING_BLOCK = 64
_SESSION_BLOCK = 128


class UnknownTrace(ValueError):
    """The file is in none of the formats."""


def even_lengths(prompt: tuple[int, int], output: tuple[int, int]) -> Lengths:
    return lambda draw: (draw.randint(*prompt), draw.randint(*output))


def poisson(
    seed: int,
    rate_per_s: float,
    seconds: float,
    lengths: Lengths,
    *,
    lane: Lane = Lane.P1,
    tenants: Sequence[str] = ("a",),
    name: str = "call",
) -> Iterator[Run]:
    """Calls that know nothing of each other."""
    arrive, shape = stream(seed, f"{name}/arrive"), stream(seed, f"{name}/shape")
    number, at = 0, 0.0
    while (at := at + arrive.expovariate(rate_per_s)) < seconds:
        yield _single(f"{name}-{number}", shape.choice(tenants), lane, at, lengths(shape), number)
        number += 1


def bursts(
    seed: int,
    calls: int,
    every_s: float,
    width_s: float,
    seconds: float,
    lengths: Lengths,
    *,
    lane: Lane = Lane.P1,
    tenants: Sequence[str] = ("a",),
    name: str = "burst",
) -> Iterator[Run]:
    """So many calls within `width_s`, again and again; the first burst comes half a period in."""
    arrive, shape = stream(seed, f"{name}/arrive"), stream(seed, f"{name}/shape")
    number, start = 0, every_s / 2
    while start < seconds:
        for at in sorted(start + arrive.random() * width_s for _ in range(calls)):
            yield _single(f"{name}-{number}", shape.choice(tenants), lane, at, lengths(shape), number)
            number += 1
        start += every_s


def agents(
    seed: int,
    count: int,
    steps: int,
    lengths: Lengths,
    *,
    tool_s: tuple[float, float] = (0.05, 0.5),
    ramp_s: float = 1.0,
    lane: Lane = Lane.P1,
    tenants: Sequence[str] = ("a",),
    name: str = "agent",
) -> Iterator[Run]:
    """A closed loop: each agent calls, waits, uses a tool and calls again with all it has seen so far."""
    arrive, shape = stream(seed, f"{name}/arrive"), stream(seed, f"{name}/shape")
    segment = 0
    for number in range(count):
        context: tuple[Piece, ...] = ()
        made = []
        for index in range(steps):
            prompt, output = lengths(shape)
            segment += 1
            context = (*context, (segment, 0, prompt))
            made.append(Step(f"step-{index}", context, output, shape.uniform(*tool_s)))
            segment += 1
            context = (*context, (segment, 0, output))
        yield Run(
            run_id=f"{name}-{number}",
            tenant=shape.choice(tenants),
            lane=lane,
            at=arrive.uniform(0, ramp_s),
            steps=tuple(made),
        )


def read_trace(path: Path, lane: Lane = Lane.P1, *, session_gap_s: float = 1.0) -> list[Run]:
    """The runs of a trace, whichever of the four formats it is in. Sessions without times start `session_gap_s` apart.

    The format is told by what the first row has in it, not by the file's name.
    """
    records = _records(path)
    first = records[0] if records else {}
    if "hash_ids" in first:
        return mooncake(records, lane)
    if "think_ms" in first:
        return coding_agents(records, lane, session_gap_s)
    if "session" in first and "hash_runs" in first:
        return agent_sessions(records, lane, session_gap_s)
    if {"t_ms", "input_tokens", "output_tokens"} <= set(first):
        return azure(records, lane)
    raise UnknownTrace(
        f"{path} is in no known trace format; its first row has {', '.join(map(str, first)) or 'nothing'}"
    )


def azure(records: Iterable[dict[str, Any]], lane: Lane) -> list[Run]:
    """Times and lengths only."""
    return [
        _single(
            f"call-{number}",
            "trace",
            lane,
            float(record["t_ms"]) / 1000,
            (int(record["input_tokens"]), int(record["output_tokens"])),
            number,
        )
        for number, record in enumerate(records)
    ]


def mooncake(records: Iterable[dict[str, Any]], lane: Lane) -> list[Run]:
    """Single calls with hashes of 512-token blocks. Published times are batched; `t_spread_ms` undoes that."""
    runs = []
    for number, record in enumerate(records):
        prompt = _cover([int(one) for one in record["hash_ids"]], _MOONCAKE_BLOCK, int(record["input_tokens"]))
        at = float(record.get("t_spread_ms", record["t_ms"])) / 1000
        step = Step("call", prompt, max(1, int(record["output_tokens"])))
        runs.append(Run(run_id=f"call-{number}", tenant="trace", lane=lane, at=at, steps=(step,)))
    return runs


def coding_agents(records: Iterable[dict[str, Any]], lane: Lane, session_gap_s: float) -> list[Run]:
    """Sessions of coding agents, closed loop: `think_ms` is the tool or human time before a call.

    Times are local to the session, so that sessions are spread out; every agent of one is a run of its own.
    """
    sessions: dict[str, list[dict[str, Any]]] = {}
    starts: dict[str, float] = {}
    for record in records:
        starts.setdefault(record["session"], len(starts) * session_gap_s)
        sessions.setdefault(f"{record['session']}/{record.get('agent', 0)}", []).append(record)
    runs = []
    for number, (name, calls) in enumerate(sessions.items()):
        base = (number + 1) << 32  # blocks are local to the session
        thinks = [float(call["think_ms"] or 0.0) / 1000 for call in calls]
        steps = tuple(
            Step(
                str(call.get("kind", "call")),
                _blocks(call, base, _CODING_BLOCK),
                max(1, int(call["output_tokens"])),
                tool,
            )
            for call, tool in zip(calls, [*thinks[1:], 0.0], strict=True)
        )
        session = calls[0]["session"]
        at = starts[session] + float(calls[0].get("t_ms") or 0.0) / 1000
        runs.append(Run(run_id=name, tenant=session, lane=lane, at=at, steps=steps))
    return runs


def agent_sessions(records: Iterable[dict[str, Any]], lane: Lane, session_gap_s: float) -> list[Run]:
    """Sessions without any timing: they start one after the other and call back to back."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        sessions.setdefault(str(record["session"]), []).append(record)
    return [
        Run(
            run_id=name,
            tenant=name,
            lane=lane,
            at=number * session_gap_s,
            # Blocks are numbered across sessions: equal numbers are equal text.
            steps=tuple(
                Step("call", _blocks(call, 0, _SESSION_BLOCK), max(1, int(call["output_tokens"]))) for call in calls
            ),
        )
        for number, (name, calls) in enumerate(sessions.items())
    ]


def _records(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        if ".csv" in path.suffixes:
            return list(csv.DictReader(file))
        return [msgspec.json.decode(line) for line in file if line.strip()]


def _blocks(call: dict[str, Any], base: int, block_tokens: int) -> tuple[Piece, ...]:
    ids = [base + first + i for first, count in call["hash_runs"] for i in range(count)]
    return _cover(ids, block_tokens, int(call["input_tokens"]))


def _cover(ids: Sequence[int], block_tokens: int, tokens: int) -> tuple[Piece, ...]:
    """A prompt of so many tokens whose blocks have these names. What the names do not cover is nobody else's."""
    pieces: list[Piece] = []
    left = max(1, tokens)
    for one in ids:
        if not left:
            break
        size = min(left, block_tokens)
        pieces.append((one + 1, 0, size))
        left -= size
    if left:
        pieces.append((hash((tokens, *ids)), 0, left))
    return tuple(pieces)


def _single(run_id: str, tenant: str, lane: Lane, at: float, lengths: tuple[int, int], number: int) -> Run:
    prompt, output = lengths
    step = Step("call", ((number + 1, 0, max(1, prompt)),), max(1, output))
    return Run(run_id=run_id, tenant=tenant, lane=lane, at=at, steps=(step,))
