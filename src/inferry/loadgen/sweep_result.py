"""The result of a sweep over concurrency: figures per level, and where the server saturates. Pure functions."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from inferry.loadgen.figures import percentile
from inferry.loadgen.load_generator import Call
from inferry.loadgen.rows import tokens_per_event

FORMAT = "inferry-bench-sweep/1"
SATURATED_SHARE = 0.95
"""A level saturates the server if its throughput is at least this share of the highest."""


class Percentiles(Struct, frozen=True):
    """Of one latency in seconds. Below 1,000 values the 99.9th is the largest."""

    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


class LevelFigures(Struct, frozen=True, kw_only=True):
    """One level. Rates count what arrived within `seconds`, after the warm-up.

    Latencies are of calls sent within them, from when a call was sent; None: no call was answered.
    `gpu_utilisation` is a fraction, None if not measured. `client_cpu` is the load generator's use of one core.
    """

    concurrency: int
    seconds: float
    calls: int
    done: int
    failed: int
    calls_per_s: float
    output_tokens_per_s: float
    ttft: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles | None
    gpu_utilisation: float | None
    client_cpu: float
    failures: dict[str, int]
    partial: bool = False


class SweepResult(Struct, frozen=True, kw_only=True):
    """A sweep. `gpu_source` says where GPU utilisation is from. `partial`: it was stopped before its end.

    `saturated_at`: the lowest concurrency whose throughput is within 5 % of the highest; None if throughput still grew
    at the last level. `ttft_missed_at`: the lowest concurrency whose p95 TTFT is above the target; None if none is.
    """

    format: str = FORMAT
    label: str
    workload: str
    command: str
    at: str
    partial: bool
    url: str
    server: str | None
    model: str
    lane: str
    versions: dict[str, str | None]
    settings: dict[str, Any]
    ttft_target_s: float
    gpu_source: str | None
    failures: dict[str, str]
    """The server's first message, by kind of failure."""
    levels: tuple[LevelFigures, ...]
    saturated_at: int | None
    ttft_missed_at: int | None

    @property
    def done(self) -> int:
        return sum(level.done for level in self.levels)


def to_json(result: SweepResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def to_csv(result: SweepResult) -> bytes:
    """A row per level. Latencies are in seconds; a cell without a figure is empty."""
    rows = [_flat(level) for level in result.levels]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_flat(_EMPTY)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def level_figures(
    concurrency: int,
    calls: Sequence[Call],
    window: tuple[float, float],
    *,
    gpu_utilisation: float | None,
    client_cpu: float,
    partial: bool,
) -> LevelFigures:
    """The figures of a level; `window` is (begin, end) after the warm-up. Cancelled calls have no latency."""
    began, ended = window
    span_s = max(ended - began, 1e-9)
    counted = [call for call in calls if began <= call.due < ended and call.outcome != "cancelled"]
    answered = [call for call in counted if call.outcome == "done"]
    tokens = sum(tokens_per_event(call) * sum(began <= moment < ended for moment in call.times) for call in calls)
    completed = sum(call.outcome == "done" and began <= call.ended < ended for call in calls)
    return LevelFigures(
        concurrency=concurrency,
        seconds=round(span_s, 3),
        calls=len(counted),
        done=len(answered),
        failed=len(counted) - len(answered),
        calls_per_s=round(completed / span_s, 3),
        output_tokens_per_s=round(tokens / span_s, 3),
        ttft=percentiles([call.times[0] - call.due for call in answered if call.times]),
        itl=percentiles([later - earlier for call in answered for earlier, later in pairwise(call.times)]),
        e2e=percentiles([call.ended - call.due for call in answered]),
        gpu_utilisation=None if gpu_utilisation is None else round(gpu_utilisation, 4),
        client_cpu=round(client_cpu, 3),
        failures=dict(Counter(call.outcome for call in counted if call.outcome != "done").most_common()),
        partial=partial,
    )


def percentiles(values: Sequence[float]) -> Percentiles | None:
    ordered = sorted(values)
    found = [percentile(ordered, part) for part in (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)]
    return Percentiles(*(round(one, 6) for one in found if one is not None)) if ordered else None


def saturated_at(levels: Sequence[LevelFigures]) -> int | None:
    """The lowest concurrency whose throughput is within 5 % of the highest; None if that is the last level."""
    highest = max((level.output_tokens_per_s for level in levels), default=0.0)
    enough = (level.concurrency for level in levels if level.output_tokens_per_s >= SATURATED_SHARE * highest)
    first = next(enough, None)
    return first if highest and first != levels[-1].concurrency else None


def ttft_missed_at(levels: Sequence[LevelFigures], ttft_target_s: float) -> int | None:
    """The lowest concurrency whose p95 TTFT is above the target."""
    return next((level.concurrency for level in levels if level.ttft and level.ttft.p95 > ttft_target_s), None)


def _flat(level: LevelFigures) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in asdict(level).items():
        if name in ("ttft", "itl", "e2e"):
            found = {} if value is None else asdict(value)
            row |= {f"{name}_{part}_s": found.get(part) for part in Percentiles.__struct_fields__}
        elif name != "failures":
            row[name] = value
    return row


_EMPTY = level_figures(0, (), (0.0, 1.0), gpu_utilisation=None, client_cpu=0.0, partial=False)
