"""What a diagnosis is made from. Every fact may be unknown: None, or an empty mapping."""

from collections.abc import Mapping

from msgspec import Struct

from inferry.domain.traffic import LaneTraffic, TenantTraffic, WorkerTraffic
from inferry.domain.workers import WorkerView

MIN_CALLS = 20
"""Calls from which a lane's figures are taken as evidence."""


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """A worker now: as the scheduler sees it, its kind, whether an operator drained it, its circuit breaker."""

    view: WorkerView
    kind: str
    drained: bool
    breaker: str


class LiveState(Struct, frozen=True, kw_only=True):
    """Jobs in flight now: those on workers by lane, streams whose reader is behind, and how many bytes."""

    running: Mapping[str, int]
    slow_streams: int
    unread_bytes: int


class LimitedTenant(Struct, frozen=True, kw_only=True):
    """A tenant that has used up, or nearly, one of its limits."""

    tenant: str
    limit: str
    value: float
    used_ratio: float


class LaneFacts(Struct, frozen=True, kw_only=True):
    """One lane over the window: its settings, and what was measured. `calls` were sent to a worker.

    `depth` is the mean number of queued jobs. `queued_ratio`: fraction of the samples with queued jobs. `backlogs`:
    number of times that a queue built up. `attainment` is the fraction of the `measured` calls that met the target.
    """

    lane: str
    ttft_ms: float | None
    itl_ms: float | None
    window: str
    coalesce_ms: float
    max_wait_ms: float
    max_batch: int
    queue_limit: int
    reserve: float
    groups: tuple[str, ...] | None
    calls: int
    calls_per_s: float
    depth: float
    depth_now: int
    queued_ratio: float
    backlogs: int
    running_now: int
    wait_mean_ms: float | None
    wait_p50_ms: float | None
    wait_p95_ms: float | None
    batching_mean_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    attainment: float | None
    measured: int
    traffic: LaneTraffic | None = None

    @property
    def is_live(self) -> bool:
        return self.ttft_ms is not None


class WorkerFacts(Struct, frozen=True, kw_only=True):
    """One worker. Means are over the window. `limits` counts which limit kept jobs from it.

    `running_queued` and `utilisation_queued` are means over the samples in which jobs were queued in the gateway, None
    without such samples: a burst in a window that is idle otherwise is judged by the time of the burst.
    `queues_at`: number of running sequences at which others wait inside the engine, None where it varies or none wait.
    `kv_ratio`: the larger one of used and predicted KV
    tokens, as a fraction of the KV cache. `padding_ratio`: fraction of the computed prompt tokens that were padding.
    """

    worker: str
    kind: str
    group: str
    phase: str
    drained: bool
    breaker: str
    opens: int
    up_ratio: float | None
    sequences: int | None
    prefill_tokens: int | None
    chunk_tokens: int | None
    pads: bool
    kv_packing: str
    running_now: int
    waiting_now: int
    running: float | None
    waiting: float | None
    queues_at: int | None
    kv_capacity: int | None
    kv_ratio: float | None
    plans: int
    batch: float | None
    utilisation: float | None
    padding_ratio: float | None
    limits: Mapping[str, int]
    traffic: WorkerTraffic | None = None
    running_queued: float | None = None
    utilisation_queued: float | None = None

    @property
    def running_then(self) -> float | None:
        """Running sequences while jobs were queued; over the whole window where none were."""
        return self.running if self.running_queued is None else self.running_queued

    @property
    def utilisation_then(self) -> float | None:
        """Utilisation while jobs were queued; over the whole window where none were."""
        return self.utilisation if self.utilisation_queued is None else self.utilisation_queued


class Facts(Struct, frozen=True, kw_only=True):
    """The gateway over the last `window_s` seconds, of which `observed_s` were sampled. Counts are of the window."""

    window_s: float
    observed_s: float
    lanes: tuple[LaneFacts, ...]
    workers: tuple[WorkerFacts, ...]
    tenants: tuple[TenantTraffic, ...] = ()
    runs: int = 0
    has_ledger: bool = True
    errors: Mapping[str, int] = {}
    refusals: Mapping[str, int] = {}
    limited: tuple[LimitedTenant, ...] = ()
    releases: Mapping[str, int] = {}
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    merged_deltas: int = 0
    slow_streams: int = 0
    unread_bytes: int = 0
    open_streams: int = 0
    loop_lag_p99_ms: float | None = None
    ledger_up: bool | None = None
    ledger_dropped: int = 0

    @property
    def calls(self) -> int:
        """Calls sent to a worker."""
        return sum(lane.calls for lane in self.lanes)

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.observed_s if self.observed_s else 0.0
