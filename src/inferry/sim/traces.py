"""Recorded traces in four formats, recognised by their first row.

A trace has arrival times and lengths of calls; block hashes, where it has them, give shared prefixes. Calls of a
session are one run of sequential steps. An invalid line is an error with its number and the expected content.
"""

import csv
import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from inferry.domain.lanes import Lane
from inferry.sim.calls import Run, Step
from inferry.sim.prompts import Piece

Count = Annotated[int, Meta(ge=0)]
Milliseconds = Annotated[float, Meta(ge=0)]
_Row = TypeVar("_Row")
_Lines = Iterator[tuple[int, dict[str, Any]]]
_MOONCAKE_BLOCK = 512
_CODING_BLOCK = 64
_SESSION_BLOCK = 128
_GZIP = b"\x1f\x8b"


class TraceError(ValueError):
    """The trace is invalid; the message has the line and the expected content."""


class UnknownTrace(TraceError):
    """The file is in none of the formats."""


class PlainCall(Struct, frozen=True):
    """A call with time and lengths only."""

    t_ms: Milliseconds
    input_tokens: Count
    output_tokens: Count


class BlockCall(Struct, frozen=True):
    """A single call with hashes of 512-token blocks. Published times are batched; `t_spread_ms` spreads them."""

    t_ms: Milliseconds
    input_tokens: Count
    output_tokens: Count
    hash_ids: tuple[int, ...]
    t_spread_ms: Milliseconds | None = None


class SessionCall(Struct, frozen=True):
    """A call of a session. `hash_runs` are [first block, how many] of 128-token blocks, numbered across sessions."""

    session: str
    input_tokens: Count
    output_tokens: Count
    hash_runs: tuple[tuple[int, Count], ...]


class CodingCall(Struct, frozen=True):
    """A call of a coding agent: `think_ms` is the tool or human time before it.

    Blocks are of 64 tokens and local to the session; times are since the session began.
    """

    session: str
    input_tokens: Count
    output_tokens: Count
    think_ms: Milliseconds | None
    hash_runs: tuple[tuple[int, Count], ...]
    agent: int | str = 0
    t_ms: Milliseconds | None = None
    kind: str = "call"


def read_trace(path: Path, lane: Lane = Lane.P1, *, session_gap_s: float = 1.0) -> list[Run]:
    """The runs of a trace. Sessions without times start `session_gap_s` apart."""
    with _text(path) as file:
        lines = _lines(path, file)
        numbered = next(lines, None)
        if numbered is None:
            raise UnknownTrace(f"{path} is empty")
        first = numbered[1]
        rows = _chain_rows(numbered, lines)
        if "hash_ids" in first:
            return _block_calls(_typed(path, rows, BlockCall), lane)
        if "think_ms" in first:
            return _coding_agents(_typed(path, rows, CodingCall), lane, session_gap_s)
        if "session" in first and "hash_runs" in first:
            return _sessions(_typed(path, rows, SessionCall), lane, session_gap_s)
        if {"t_ms", "input_tokens", "output_tokens"} <= set(first):
            return _plain_calls(_typed(path, rows, PlainCall), lane)
    raise UnknownTrace(
        f"{path} is in no known trace format. Its first row has {', '.join(map(str, first)) or 'nothing'}; "
        "expected are t_ms, input_tokens and output_tokens, with hash_ids or not, or session, input_tokens, "
        "output_tokens and hash_runs, with think_ms or not"
    )


# Reading.


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as raw:
        compressed = raw.read(2) == _GZIP
    with gzip.open(path, "rt", encoding="utf-8") if compressed else path.open(encoding="utf-8") as file:
        yield file


def _lines(path: Path, file: IO[str]) -> _Lines:
    """Rows by line number: JSON objects if the first line is one, else CSV with a header."""
    number = 0
    header: list[str] | None = None
    try:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if header is None and line.lstrip().startswith("{"):
                header = []
            if header:
                values = next(csv.reader([line]))
                if len(values) != len(header):
                    raise TraceError(
                        f"{path}, line {number}: expected {len(header)} values ({', '.join(header)}), got {len(values)}"
                    )
                yield number, dict(zip(header, values, strict=True))
            elif header is None:
                header = [name.strip() for name in next(csv.reader([line]))]
            else:
                yield number, _object(path, number, line)
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}, after line {number}: the file cannot be read further: {error}") from None


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}, line {number}: expected a JSON object, but {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:40]}")
    return row


def _chain_rows(first: tuple[int, dict[str, Any]], rest: _Lines) -> _Lines:
    yield first
    yield from rest


def _typed(path: Path, lines: _Lines, kind: Callable[..., _Row]) -> Iterator[_Row]:
    for number, row in lines:
        try:
            yield msgspec.convert(row, kind, strict=False)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            field = where.strip("`").removeprefix("$.").removeprefix("$")
            what = what[:1].lower() + what[1:]
            raise TraceError(f"{path}, line {number}: {f'{field}: ' if field else ''}{what}") from None


# From rows to runs.


def _plain_calls(rows: Iterator[PlainCall], lane: Lane) -> list[Run]:
    return [
        Run(
            run_id=f"call-{number}",
            tenant="trace",
            lane=lane,
            at=row.t_ms / 1000,
            steps=(Step("call", ((number + 1, 0, max(1, row.input_tokens)),), max(1, row.output_tokens)),),
        )
        for number, row in enumerate(rows)
    ]


def _block_calls(rows: Iterator[BlockCall], lane: Lane) -> list[Run]:
    return [
        Run(
            run_id=f"call-{number}",
            tenant="trace",
            lane=lane,
            at=(row.t_ms if row.t_spread_ms is None else row.t_spread_ms) / 1000,
            steps=(
                Step("call", _cover_tokens(row.hash_ids, _MOONCAKE_BLOCK, row.input_tokens), max(1, row.output_tokens)),
            ),
        )
        for number, row in enumerate(rows)
    ]


def _coding_agents(rows: Iterator[CodingCall], lane: Lane, session_gap_s: float) -> list[Run]:
    """Closed loops. Times are local to a session, so sessions are spread out; every agent of a session is a run."""
    agents: dict[str, list[CodingCall]] = {}
    starts: dict[str, float] = {}
    for row in rows:
        starts.setdefault(row.session, len(starts) * session_gap_s)
        agents.setdefault(f"{row.session}/{row.agent}", []).append(row)
    runs = []
    for number, (name, calls) in enumerate(agents.items()):
        base = (number + 1) << 32  # blocks are local to the session
        think_times_s = [(call.think_ms or 0.0) / 1000 for call in calls]
        steps = tuple(
            Step(call.kind, _blocks(call, base, _CODING_BLOCK), max(1, call.output_tokens), tool)
            for call, tool in zip(calls, [*think_times_s[1:], 0.0], strict=True)
        )
        at = starts[calls[0].session] + (calls[0].t_ms or 0.0) / 1000
        runs.append(Run(run_id=name, tenant=calls[0].session, lane=lane, at=at, steps=steps))
    return runs


def _sessions(rows: Iterator[SessionCall], lane: Lane, session_gap_s: float) -> list[Run]:
    """Sessions without times: they start `session_gap_s` apart and call without pauses."""
    sessions: dict[str, list[SessionCall]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    return [
        Run(
            run_id=name,
            tenant=name,
            lane=lane,
            at=number * session_gap_s,
            # Blocks are numbered across sessions: equal numbers are equal text.
            steps=tuple(Step("call", _blocks(call, 0, _SESSION_BLOCK), max(1, call.output_tokens)) for call in calls),
        )
        for number, (name, calls) in enumerate(sessions.items())
    ]


def _blocks(call: SessionCall | CodingCall, base: int, block_tokens: int) -> tuple[Piece, ...]:
    ids = [base + first + i for first, count in call.hash_runs for i in range(count)]
    return _cover_tokens(ids, block_tokens, call.input_tokens)


def _cover_tokens(ids: Sequence[int], block_tokens: int, tokens: int) -> tuple[Piece, ...]:
    """A prompt of `tokens` tokens with these block hashes. Tokens beyond the hashed blocks are unique."""
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
