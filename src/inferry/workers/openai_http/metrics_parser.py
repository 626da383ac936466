"""Parser for an engine's metrics page that reads only the needed samples. Pure."""

import math
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from inferry.workers.openai_http.profiles import MetricNames

_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


class StepCounters(Struct, frozen=True):
    """Steps of an engine since its start, and the tokens computed in them.

    All tokens of a prompt count in the step that ends it, so the tokens per step do not show the engine's limit.
    """

    count: float = 0.0
    tokens: float = 0.0


class MetricsSnapshot(Struct, frozen=True, kw_only=True):
    """One reading of an engine's metrics. Counters count since its start."""

    running: int
    waiting: int
    kv_usage: float | None = None
    kv_capacity: int | None = None
    prefix_hits: float = 0.0
    preemptions: float = 0.0
    steps: StepCounters | None = None
    output_tokens: float | None = None

    @property
    def sequences(self) -> int:
        return self.running + self.waiting

    @property
    def kv_tokens(self) -> int:
        if self.kv_usage is None or self.kv_capacity is None:
            return 0
        return int(min(max(self.kv_usage, 0.0), 1.0) * self.kv_capacity)


def read_metrics(page: bytes, names: MetricNames) -> MetricsSnapshot | None:
    """The reading; None where the page lacks running and waiting requests. Engines of one server are summed."""
    page = b"\n" + page
    running, waiting = _total(page, names.running), _total(page, names.waiting)
    if running is None or waiting is None:
        return None
    usages = [value for _, value in _samples(page, names.kv_usage)]
    return MetricsSnapshot(
        running=int(running),
        waiting=int(waiting),
        kv_usage=sum(usages) / len(usages) if usages else None,
        kv_capacity=_capacity(page, names),
        prefix_hits=_total(page, names.prefix_hits) or 0.0,
        preemptions=_total(page, names.preemptions) or 0.0,
        steps=_step_counters(page, names.step_tokens),
        output_tokens=_total(page, names.output_tokens),
    )


def _samples(page: bytes, name: bytes | None) -> Iterator[tuple[bytes, float]]:
    """Labels and value of every sample of this name. Values that are no numbers are skipped."""
    if name is None:
        return
    start = b"\n" + name
    at = page.find(start)
    while at >= 0:
        end = page.find(b"\n", at + 1)
        end = len(page) if end < 0 else end
        line = page[at + len(start) : end]
        if line[:1] not in (b"{", b" "):  # a longer name
            at = page.find(start, end)
            continue
        labels, _, rest = line.rpartition(b"}")
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            value = math.nan
        if math.isfinite(value) and value >= 0:
            yield labels[1:], value
        at = end if page.startswith(start, end) else -1  # samples of one name are adjacent


def _total(page: bytes, name: bytes | None) -> float | None:
    found = [value for _, value in _samples(page, name)]
    return sum(found) if found else None


def _capacity(page: bytes, names: MetricNames) -> int | None:
    reported = _total(page, names.kv_capacity)
    if reported is not None:
        return int(reported) or None
    tokens = 0
    for labels, _ in _samples(page, names.cache_info):
        label = dict(_LABEL.findall(labels))
        size = _int_label(label.get(b"kv_cache_size_tokens"))
        tokens += size or _int_label(label.get(b"block_size")) * _int_label(label.get(b"num_gpu_blocks"))
    return tokens or None


def _int_label(text: Any) -> int:
    """A label as a number; 0 where it is none, for example `None`."""
    try:
        return max(0, int(text or b"0"))
    except ValueError:
        return 0


def _step_counters(page: bytes, name: bytes | None) -> StepCounters | None:
    if name is None:
        return None
    count, tokens = _total(page, name + b"_count"), _total(page, name + b"_sum")
    return None if count is None or tokens is None else StepCounters(count, tokens)
