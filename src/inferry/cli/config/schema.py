"""The configuration keys as frozen Structs, one per component. Every key has a default."""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from inferry.cli.config.alerts import AlertsConfig
from inferry.cli.config.callbacks import CallbacksConfig
from inferry.cli.config.cluster import ClusterConfig
from inferry.cli.config.histories import HistoryConfig
from inferry.cli.config.overflow import OverflowConfig
from inferry.cli.config.pipelines import PipelineConfig
from inferry.cli.config.retention import RetentionConfig
from inferry.cli.config.scaling import ScalingConfig
from inferry.cli.config.sessions import SessionsConfig
from inferry.cli.config.single_flight import SingleFlightConfig
from inferry.cli.config.storage import StorageConfig
from inferry.cli.config.tenants import AuthConfig, PriceConfig, TenantConfig
from inferry.cli.config.tracing import TracingConfig
from inferry.cli.config.trials import SettingsConfig
from inferry.cli.config.workers import EmbeddedWorkerConfig, WorkerConfig
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.prices import Price
from inferry.domain.tenants import Tenant
from inferry.pipelines.settings import CascadeConfig, EnsembleConfig, RouteConfig


class ConfigError(Exception):
    """The configuration is invalid; the message names the path and the reason."""


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback require a key, see `auth`."""
    port: int = 8000
    """Port to listen on; 0 selects a free one."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Maximum request body; larger bodies get 413 `body_too_large`."""
    max_prompts: int = 512
    """Maximum prompts in one call of `/v1/completions`. Each is a job of its own; the jobs of a call are admitted
    together, which takes some 25 to 80 µs of the event loop each."""
    body_timeout_s: float = 30.0
    """Time for a request body to arrive, in seconds."""
    idle_timeout_s: float = 75.0
    """Time a connection may stay open without a request, in seconds."""
    request_timeout_s: float | None = None
    """Maximum time of a call from its arrival to its end, in seconds, queueing included; beyond it the call ends with
    504 `request_timeout`, in-band where its answer has begun. null sets no limit. A call may set an earlier deadline
    with `x-inferry-deadline-ms`."""
    heartbeat_interval_s: float = 15.0
    """After this many seconds without an event a stream gets its headers and an SSE comment."""
    max_unread_bytes: int = 8 * 1024 * 1024
    """Unread bytes of a stream after which its connection is reset and its call cancelled."""
    max_queued_bytes: int = 512 * 1024 * 1024
    """Maximum bytes of request bodies in all queues; beyond it calls get 429 `queue_full`."""
    retry_slots: bool = True
    """Whether a call refused with `queue_full` gets a retry slot: a time of its own at which it is admitted before
    new calls. Without slots the time to retry is when everything queued now will have been sent."""
    drain_timeout_s: float = 30.0
    """After SIGTERM: time for accepted calls to complete, in seconds. The same for calls of a removed worker."""
    admin_key: str | None = None
    """Bearer token for `/admin/…`, and the key that the dashboard asks for; INFERRY_ADMIN_KEY sets it too. null admits
    clients on this host only."""


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Circuit breaker, liveness checks, slow start and hedged retries of workers."""

    failure_threshold: int = 3
    """Different jobs lost in a row after which the circuit breaker opens. One job alone never opens it."""
    failure_window_s: float = 30.0
    """The breaker also opens if `failure_threshold` jobs are lost within this time (seconds) and they are at least
    `failure_ratio` of the jobs that ended there."""
    failure_ratio: float = 0.5
    """See `failure_window_s`."""
    initial_backoff_s: float = 0.25
    """Seconds until a worker with an open breaker is probed with one token; doubles with every failure."""
    max_backoff_s: float = 10.0
    """Maximum backoff, in seconds."""
    slow_start_share: float = 0.1
    """Fraction of its capacity that a recovered worker gets first; doubles until it has all of it."""
    slow_start_doubling_s: float = 1.0
    """Seconds between two doublings."""
    liveness_interval_s: float = 2.0
    """Interval at which an idle HTTP worker is polled: its metrics page, or its models. Hosted APIs (`kind:
    openai`) are not polled."""
    liveness_timeout_s: float = 1.5
    """A worker is down if two polls in a row stay unanswered and nothing else is received for this many seconds.
    Slow responses and long prompts extend it."""
    no_worker_timeout_s: float = 30.0
    """How long a call without a deadline waits for a worker of its model, in seconds, before it gets 503
    `no_worker`; 0 refuses at once. A call with a deadline waits until the deadline. Calls wait only if a worker of the
    model has been up since the gateway started, or is started on demand: before that they get 503 at once."""
    max_hedged_retry_ratio: float = 0.02
    """Maximum fraction of calls that are retried on another worker because their first token is overdue and their
    worker silent; 0 disables hedged retries."""


class LaneConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One lane; omitted keys keep the lane's default."""

    max_wait_ms: float | UnsetType = UNSET
    """Longest hold of a job for others to join its batch; after it the job is sent alone. Pauses of runs
    (`sessions.max_pause_s`) do not count."""
    coalesce_ms: float | UnsetType = UNSET
    """Longest hold of a job in a batching window, from its arrival."""
    window: Literal["adaptive", "fixed", "off"] | UnsetType = UNSET
    """`adaptive` holds a job only where it pays: for busy workers that pad, for embeddings and scores that are cheaper
    together, and for siblings that would recompute a long prefix. `fixed` always holds, `off` never."""
    max_batch: int | UnsetType = UNSET
    """A batching window closes when it has this many jobs."""
    queue_limit: int | UnsetType = UNSET
    """Maximum number of queued jobs."""
    high_watermark: float | UnsetType = UNSET
    """Fraction of `queue_limit` from which new calls get 429 `queue_full`. The rest is for calls with retry slots
    and for tenants that hold less than their part of the queue."""
    share: float | UnsetType = UNSET
    """Guaranteed fraction of the admitted prompt tokens while higher lanes are busy."""
    reserve: float | UnsetType = UNSET
    """Fraction of every worker's capacity that jobs of this lane leave to higher lanes."""
    may_preempt: tuple[Literal["P0", "P1", "P2"], ...] | UnsetType = UNSET
    """Lower lanes whose running jobs may be preempted for a job of this lane, where they are `preemptible`; they resume
    later. Where the lane names itself, its own jobs yield once they have written twice their predicted output."""
    preemptible: bool | UnsetType = UNSET
    """Whether running jobs of this lane may be preempted by a lane that names it."""
    ttft_ms: float | UnsetType | None = UNSET
    """SLO target: time to first token. Measured by `inferry_slo_attainment_total`. A lane with targets is live, one
    without (null) is a batch lane."""
    itl_ms: float | UnsetType | None = UNSET
    """SLO target: inter-token latency. A lane has both targets or neither."""
    ttft_ms_per_1k_tokens: float | UnsetType = UNSET
    """Milliseconds added to `ttft_ms` for every 1,000 prompt tokens that are not cached, so that long prompts have a
    target that they can meet."""
    groups: tuple[str, ...] | UnsetType | None = UNSET
    """Worker groups the lane may use, best first; null allows all. Workers name theirs in `workers[].group`."""
    borrow_groups: bool | UnsetType = UNSET
    """Whether a batch lane with `groups` may also use workers of other groups while no live call needs them. The first
    live call evicts its jobs there; they resume later."""
    long_output_tokens: int | UnsetType | None = UNSET
    """Predicted output tokens from which a call is long. Short and long calls then share no padded pass, and use
    workers whose `output_length` is theirs or null while one is up. null separates nothing."""
    prompt_buckets: tuple[int, ...] | UnsetType = UNSET
    """Prompt lengths that bound buckets, in tokens, such as `[128, 512]`. Calls of different buckets share no padded
    pass, which costs less padding and makes passes smaller. Empty: one bucket."""


class LanesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three lanes."""

    P0: LaneConfig = LaneConfig()
    """Interactive."""
    P1: LaneConfig = LaneConfig()
    """Standard."""
    P2: LaneConfig = LaneConfig()
    """Batch."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of `inferry serve`."""

    server: ServerConfig = ServerConfig()
    """The HTTP server."""
    lanes: LanesConfig = LanesConfig()
    """SLO targets, shares and limits per lane."""
    workers: tuple[WorkerConfig, ...] = (EmbeddedWorkerConfig(),)
    """The engines. With a `workers_file` and no `workers` there is no built-in worker."""
    workers_file: str | None = None
    """A YAML list of further workers, written as in `workers` and checked every second: workers are added, replaced
    and removed as it changes. It is a regular file of at most 1 MiB. An invalid file is logged and changes nothing.
    With `cluster.listen` only the gateway that owns the workers uses it."""
    scaling: ScalingConfig = ScalingConfig()
    """How many workers a group should have."""
    sessions: SessionsConfig = SessionsConfig()
    """Runs whose KV does not fit the engines' caches."""
    health: HealthConfig = HealthConfig()
    """Failure detection and recovery of workers."""
    auth: AuthConfig = AuthConfig()
    """Whether calls need a key."""
    tenants: dict[str, TenantConfig] = {}
    """Limits by tenant name. `/admin/tenants` and `inferry tenants` add others."""
    prices: dict[str, PriceConfig] = {}
    """Prices by model name; `*` is any other model."""
    routes: dict[str, RouteConfig] = {}
    """Names that choose one of several models for each call. See [Routes](../howto/routes.md)."""
    cascades: dict[str, CascadeConfig] = {}
    """Names whose calls a small model answers, and a large one where the small one is unsure. See
    [Cascades](../howto/cascades.md)."""
    ensembles: dict[str, EnsembleConfig] = {}
    """Names whose calls several models answer together. See [Ensembles](../howto/ensembles.md)."""
    overflow: OverflowConfig = OverflowConfig()
    """When calls go to hosted workers because own ones are too busy."""
    pipelines: dict[str, PipelineConfig] = {}
    """Pipelines of several models, by name."""
    single_flight: SingleFlightConfig = SingleFlightConfig()
    """When calls share one execution."""
    storage: StorageConfig = StorageConfig()
    """Stored content of tenants: responses, files, batches and async jobs."""
    histories: dict[str, HistoryConfig] = {}
    """Summaries of long conversations by model name; `*` is any other model. Empty: none."""
    callbacks: CallbacksConfig = CallbacksConfig()
    """Callbacks of async jobs: where they may go, and when they are retried."""
    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry traces."""
    alerts: AlertsConfig = AlertsConfig()
    """Alerts that the gateway evaluates itself, and where they are sent."""
    retention: RetentionConfig = RetentionConfig()
    """How long the ledger keeps rows."""
    settings: SettingsConfig = SettingsConfig()
    """Trials of other settings, and when they are rolled back."""
    cluster: ClusterConfig = ClusterConfig()
    """Several gateways that share their limits."""
    ledger: str = "sqlite:///inferry.db"
    """Database of attempts, keys and stored content: `sqlite:///PATH`, or
    `postgresql://USER:PASSWORD@HOST:PORT/DATABASE` (with `pip install 'inferry[postgres]'`). One gateway at a time
    writes to it, unless gateways share their limits (`cluster.redis`): a second `inferry serve` with the same ledger
    exits with an error. `"sqlite:///:memory:"` keeps
    everything in the process. INFERRY_LEDGER sets it too, which keeps a password out of the file."""

    def configured_tenants(self) -> dict[str, Tenant]:
        return {name: one.tenant(name) for name, one in self.tenants.items()}

    def price_list(self) -> dict[str, Price]:
        return {model: one.price() for model, one in self.prices.items()}

    def lane_policies(self) -> dict[Lane, LanePolicy]:
        return {lane: _lane_policy(lane, getattr(self.lanes, lane.name)) for lane in Lane}


def _lane_policy(lane: Lane, override: LaneConfig) -> LanePolicy:
    given = {name: value for name in LaneConfig.__struct_fields__ if (value := getattr(override, name)) is not UNSET}
    if "may_preempt" in given:
        given["may_preempt"] = tuple(Lane[name] for name in given["may_preempt"])
    return msgspec.structs.replace(DEFAULT_LANES[lane], **given)
