"""Gauges of workers, from their views and their health, read when metrics are scraped or sampled."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from inferry.domain.workers import KvBlocks, Phase, WorkerView
from inferry.observe.metric_families import Rows

OTHER = "other"
"""Label of everything that has no label of its own."""
BREAKER_STATES = ("closed", "open", "half_open")


class WorkerHealth(NamedTuple):
    """A worker's health: its breaker's state, how often the breaker has opened, the share of its capacity in use, and
    how many of its calls were retried elsewhere for an overdue first token."""

    worker: str
    breaker: str
    opens: int
    share: float
    overdue: int = 0


class WorkerStates:
    """Where the states of workers are read. `known` are the workers that have labels of their own."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self.views: Callable[[], Iterable[WorkerView]] = tuple
        self.health: Callable[[], Iterable[WorkerHealth]] = tuple
        self.kv_predicted: Callable[[], Mapping[str, int]] = dict

    def rows(self) -> dict[str, Rows]:
        """Gauges of all workers; a known worker without a view is down."""
        up = dict.fromkeys(self._known, 0.0)
        phases: dict[tuple[str, ...], float] = {}
        running: dict[str, float] = {}
        waiting: dict[str, float] = {}
        used: dict[str, float] = {}
        capacity: dict[str, float] = {}
        predicted: dict[str, float] = {}
        kv_caches: dict[str, list[KvBlocks]] = {}
        for worker, tokens in self.kv_predicted().items():
            _add(predicted, worker if worker in self._known else OTHER, tokens)
        for view in self.views():
            # Several unknown workers share one label, and so one sum.
            name = view.worker if view.worker in self._known else OTHER
            _add(up, name, view.phase in (Phase.READY, Phase.DRAINING))
            for phase in Phase:
                key = (name, phase.value)
                phases[key] = phases.get(key, 0.0) + (phase is view.phase)
            _add(running, name, view.load.running)
            _add(waiting, name, view.load.waiting)
            _add(used, name, view.load.kv_tokens)
            if view.kv_capacity is not None:
                _add(capacity, name, view.kv_capacity)
            if view.kv_blocks is not None:
                kv_caches.setdefault(name, []).append(view.kv_blocks)
        return {
            "inferry_worker_up": _by_worker(up),
            "inferry_worker_phase": phases.items(),
            "inferry_worker_running_sequences": _by_worker(running),
            "inferry_worker_waiting_sequences": _by_worker(waiting),
            "inferry_worker_kv_used_tokens": _by_worker(used),
            "inferry_worker_kv_predicted_tokens": _by_worker(predicted),
            "inferry_worker_kv_capacity_tokens": _by_worker(capacity),
            **_kv_rows(kv_caches),
            **self._breaker_rows(),
        }

    def _breaker_rows(self) -> dict[str, Rows]:
        known = [one for one in self.health() if one.worker in self._known]
        return {
            "inferry_worker_breaker_state": [
                ((one.worker, state), float(one.breaker == state)) for one in known for state in BREAKER_STATES
            ],
            "inferry_worker_breaker_opens_total": [((one.worker,), float(one.opens)) for one in known],
            "inferry_worker_capacity_share": [((one.worker,), one.share) for one in known],
            "inferry_hedged_retries_total": [((one.worker,), float(one.overdue)) for one in known],
        }


def _kv_rows(kv_caches: Mapping[str, Sequence[KvBlocks]]) -> dict[str, Rows]:
    """Gauges and counters of the KV caches of engines that tell their blocks, summed by label."""
    blocks: dict[tuple[str, ...], float] = {}
    fragmented: dict[str, float] = {}
    queries: dict[str, float] = {}
    hits: dict[str, float] = {}
    for name, caches in kv_caches.items():
        held, cached = sum(one.held for one in caches), sum(one.cached for one in caches)
        kept, span = sum(one.kept for one in caches), sum(one.span for one in caches)
        blocks[name, "held"], blocks[name, "kept"], blocks[name, "cached"] = held, kept, cached - kept
        blocks[name, "empty"] = sum(one.blocks for one in caches) - held - cached
        fragmented[name] = 1 - held / span if span else 0.0
        queries[name] = sum(one.prefix_queries for one in caches)
        hits[name] = sum(one.prefix_hits for one in caches)
    return {
        "inferry_engine_kv_blocks": blocks.items(),
        "inferry_engine_kv_fragmentation_ratio": _by_worker(fragmented),
        "inferry_engine_prefix_cache_queries_total": _by_worker(queries),
        "inferry_engine_prefix_cache_hits_total": _by_worker(hits),
    }


def _add(totals: dict[str, float], name: str, value: float) -> None:
    totals[name] = totals.get(name, 0.0) + value


def _by_worker(totals: Mapping[str, float]) -> Rows:
    return [((name,), value) for name, value in totals.items()]
