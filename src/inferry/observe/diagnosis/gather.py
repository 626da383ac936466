"""Facts from the history of the metrics, the workers' present state and the ledger's recent traffic."""

from collections.abc import Mapping, Sequence
from math import ceil

from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.traffic import LaneTraffic, Traffic, WorkerTraffic
from inferry.observe.diagnosis.facts import Facts, LaneFacts, LimitedTenant, LiveState, WorkerFacts, WorkerStatus
from inferry.observe.history import Labels, MetricHistory

MIN_PLATEAU_SAMPLES = 3
PLATEAU = 0.9
"""An engine at its own limit runs at least this part of its maximum in every sample in which sequences wait."""


def gather(
    history: MetricHistory,
    window_s: float,
    *,
    lanes: Mapping[Lane, LanePolicy],
    workers: Sequence[WorkerStatus],
    live: LiveState,
    limited: Sequence[LimitedTenant] = (),
    traffic: Traffic | None = None,
) -> Facts:
    """The facts of the last `window_s` seconds. A metric that the gateway does not have is unknown."""
    window = _Window(history, window_s)
    by_lane = {} if traffic is None else {one.lane: one for one in traffic.lanes}
    by_worker = {} if traffic is None else {one.worker: one for one in traffic.workers}
    lag_s = window.quantile(0.99, "inferry_event_loop_lag_seconds")
    ledger_up = history.latest("inferry_ledger_up")
    return Facts(
        window_s=window_s,
        observed_s=window.observed_s,
        lanes=tuple(_lane(window, lane, policy, live, by_lane.get(lane.name)) for lane, policy in lanes.items()),
        workers=tuple(_worker(window, one, by_worker.get(one.view.worker)) for one in workers),
        tenants=() if traffic is None else traffic.tenants,
        runs=0 if traffic is None else traffic.runs,
        has_ledger=traffic is not None,
        errors=window.by_label("inferry_errors_total", "code"),
        refusals=window.by_label("inferry_limit_refusals_total", "limit"),
        limited=tuple(limited),
        releases=window.by_label("inferry_plans_total", "reason"),
        retries=window.count("inferry_attempt_retries_total"),
        prompt_tokens=window.count("inferry_tokens_total", kind="prompt"),
        cached_tokens=window.count("inferry_tokens_total", kind="cached"),
        output_tokens=window.count("inferry_tokens_total", kind="output"),
        merged_deltas=window.count("inferry_merged_deltas_total"),
        slow_streams=live.slow_streams,
        unread_bytes=live.unread_bytes,
        open_streams=int(history.latest("inferry_open_streams") or 0),
        loop_lag_p99_ms=_ms(lag_s),
        ledger_up=None if ledger_up is None else ledger_up > 0,
        ledger_dropped=window.count("inferry_ledger_entries_dropped_total"),
    )


class _Window:
    """A history over one window."""

    def __init__(self, history: MetricHistory, seconds: float) -> None:
        self.history = history
        self.seconds = seconds
        self._means: dict[str, dict[str, float]] = {}
        self._limits: dict[Labels, float] | None = None
        self._queued_at: set[float] | None = None
        sampled = history.values("inferry_jobs_in_flight", seconds)
        self.observed_s = sampled[-1][0] - sampled[0][0] if sampled else 0.0

    def count(self, name: str, **labels: str) -> int:
        return ceil(self.history.increase(name, self.seconds, **labels))

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Increases by the values of one label, without zeros."""
        found = self.history.increase_by(name, self.seconds, (label,))
        return {labels[0][1]: ceil(number) for labels, number in found.items() if number}

    def limits(self, worker: str) -> dict[str, int]:
        """Which limits kept jobs from the worker, and how often."""
        if self._limits is None:
            self._limits = self.history.increase_by("inferry_binding_limit_total", self.seconds, ("worker", "limit"))
        return {
            limit: ceil(number) for ((_, name), (_, limit)), number in self._limits.items() if name == worker and number
        }

    def mean(self, name: str, label: str, value: str) -> float | None:
        """Mean of a gauge by one label. All its series are read at once, since every worker or lane asks for it."""
        means = self._means.get(name)
        if means is None:
            found = self.history.mean_by(name, self.seconds, (label,))
            means = self._means[name] = {labels[0][1]: sum(values) for labels, values in found.items()}
        return means.get(value)

    def mean_queued(self, name: str, worker: str) -> float | None:
        """Mean of a worker's gauge over the samples in which jobs were queued."""
        if self._queued_at is None:
            depths = self.history.values("inferry_queue_depth", self.seconds)
            self._queued_at = {at for at, depth in depths if depth > 0}
        if not self._queued_at:
            return None
        values = [
            value for at, value in self.history.values(name, self.seconds, worker=worker) if at in self._queued_at
        ]
        return sum(values) / len(values) if values else None

    def observed(self, name: str, **labels: str) -> int:
        """Values that a histogram observed."""
        return self.history.count(name, self.seconds, **labels)

    def observed_mean(self, name: str, **labels: str) -> float | None:
        number = self.observed(name, **labels)
        return self.history.increase(name, self.seconds, **labels) / number if number else None

    def quantile(self, q: float, name: str, **labels: str) -> float | None:
        return self.history.quantile(q, name, self.seconds, **labels)


def _lane(window: _Window, lane: Lane, policy: LanePolicy, live: LiveState, traffic: LaneTraffic | None) -> LaneFacts:
    name = lane.name
    met = window.count("inferry_slo_attainment_total", lane=name, attained="true")
    measured = met + window.count("inferry_slo_attainment_total", lane=name, attained="false")
    waits, ttft, itl = (
        *("inferry_queue_wait_seconds", "inferry_time_to_first_token_seconds", "inferry_inter_token_latency_seconds"),
    )
    calls = window.observed(waits, lane=name)
    has_queue = [depth > 0 for _, depth in window.history.values("inferry_queue_depth", window.seconds, lane=name)]
    return LaneFacts(
        lane=name,
        ttft_ms=policy.ttft_ms,
        itl_ms=policy.itl_ms,
        window=policy.window,
        coalesce_ms=policy.coalesce_ms,
        max_wait_ms=policy.max_wait_ms,
        max_batch=policy.max_batch,
        queue_limit=policy.queue_limit,
        reserve=policy.reserve,
        groups=policy.groups,
        calls=calls,
        calls_per_s=calls / window.observed_s if window.observed_s else 0.0,
        depth=window.mean("inferry_queue_depth", "lane", name) or 0.0,
        depth_now=int(window.history.latest("inferry_queue_depth", lane=name) or 0),
        queued_ratio=sum(has_queue) / len(has_queue) if has_queue else 0.0,
        backlogs=sum(now and not before for before, now in zip([False, *has_queue], has_queue, strict=False)),
        running_now=live.running.get(name, 0),
        wait_mean_ms=_ms(window.observed_mean(waits, lane=name)),
        wait_p50_ms=_ms(window.quantile(0.5, waits, lane=name)),
        wait_p95_ms=_ms(window.quantile(0.95, waits, lane=name)),
        batching_mean_ms=_ms(window.observed_mean("inferry_batching_wait_seconds", lane=name)),
        ttft_p50_ms=_ms(window.quantile(0.5, ttft, lane=name)),
        ttft_p95_ms=_ms(window.quantile(0.95, ttft, lane=name)),
        itl_p50_ms=_ms(window.quantile(0.5, itl, lane=name)),
        itl_p95_ms=_ms(window.quantile(0.95, itl, lane=name)),
        itl_p99_ms=_ms(window.quantile(0.99, itl, lane=name)),
        attainment=met / measured if measured else None,
        measured=measured,
        traffic=traffic,
    )


def _worker(window: _Window, status: WorkerStatus, traffic: WorkerTraffic | None) -> WorkerFacts:
    view, name = status.view, status.view.worker
    waiting = window.mean("inferry_worker_waiting_sequences", "worker", name)
    padding = window.count("inferry_padding_tokens_total", worker=name)
    padded = padding + window.count("inferry_padded_prompt_tokens_total", worker=name)
    capacity = view.kv_capacity or view.capacity.kv_tokens
    used = window.mean("inferry_worker_kv_used_tokens", "worker", name)
    predicted = window.mean("inferry_worker_kv_predicted_tokens", "worker", name)
    return WorkerFacts(
        worker=name,
        kind=status.kind,
        group=view.group,
        phase=view.phase.value,
        drained=status.drained,
        breaker=status.breaker,
        opens=window.count("inferry_worker_breaker_opens_total", worker=name),
        up_ratio=window.mean("inferry_worker_up", "worker", name),
        sequences=view.capacity.sequences,
        prefill_tokens=view.capacity.prefill_tokens,
        chunk_tokens=view.chunk_tokens,
        pads=view.pads,
        kv_packing=view.kv_packing,
        running_now=view.load.running,
        waiting_now=view.load.waiting,
        running=window.mean("inferry_worker_running_sequences", "worker", name),
        waiting=waiting,
        queues_at=_queues_at(window, name) if waiting else None,
        kv_capacity=capacity,
        kv_ratio=None if not capacity else max(used or 0.0, predicted or 0.0) / capacity,
        plans=window.observed("inferry_batch_size", worker=name),
        batch=window.observed_mean("inferry_batch_size", worker=name),
        utilisation=window.mean("inferry_worker_gpu_utilization_ratio", "worker", name),
        padding_ratio=padding / padded if padded else None,
        limits=window.limits(name),
        traffic=traffic,
        running_queued=window.mean_queued("inferry_worker_running_sequences", name),
        utilisation_queued=window.mean_queued("inferry_worker_gpu_utilization_ratio", name),
    )


def _queues_at(window: _Window, worker: str) -> int | None:
    """The number of running sequences while others wait inside the engine, if it is always about the same."""
    waiting = dict(window.history.values("inferry_worker_waiting_sequences", window.seconds, worker=worker))
    running = window.history.values("inferry_worker_running_sequences", window.seconds, worker=worker)
    while_waiting = [number for at, number in running if waiting.get(at, 0.0) >= 1]
    if len(while_waiting) < MIN_PLATEAU_SAMPLES or min(while_waiting) < PLATEAU * max(while_waiting):
        return None
    return round(max(while_waiting))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
