"""Tuning constants of the scheduler that the ablation changes, with what each means and what "removed" is for it.

`removed` is a value that takes the rule away or makes it indistinguishable from a neighbouring one. `halved` and
`doubled` are that, unless the constant is a part of something and twice of it would be more than all: then a value
nearer to the bound stands for it. `defaults` name functions that bound the value when they were defined.
"""

from typing import Any

from msgspec import Struct

from inferry.domain.values import replace

_CONTROLLER = "inferry.scheduling.capacity.controller"
_STEP_COSTS = "inferry.scheduling.capacity.step_costs"
_OVERLOAD = "inferry.scheduling.overload"
_PREEMPTION = "inferry.scheduling.preemption"
_SIBLING_WINDOW = "inferry.scheduling.batching.sibling_window"
_SIM = "inferry.sim.controlled_gateway"
_NEVER = 1e9


class Constant(Struct, frozen=True, kw_only=True):
    """One constant. `only` names the workloads that can reach it; None: all of them."""

    module: str
    name: str
    meaning: str
    removed: Any = None
    halved: Any = None
    doubled: Any = None
    defaults: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.name}"


def _of(module: str, *rows: tuple[Any, ...], only: tuple[str, ...] | None = None) -> list[Constant]:
    """Rows of name, meaning, removed, and where twice or half make no sense, halved and doubled."""
    made = []
    for name, meaning, removed, *other in rows:
        halved, doubled = other or (None, None)
        made.append(
            Constant(
                module=module, name=name, meaning=meaning, removed=removed, halved=halved, doubled=doubled, only=only
            )
        )
    return made


_BY_DEFAULT = {
    "quantum.QUANTUM_TOKENS": (
        "inferry.scheduling.capacity.prefill_bucket:TickContext.__init__",
        "inferry.scheduling.scheduler:Scheduler.__init__",
    ),
}

_CONTROLLER_ROWS = _of(
    _CONTROLLER,
    ("IDLE_AFTER_S", "Seconds without a job in flight after which a lane counts as idle.", 0.0),
    ("PREFILL_TTFT_FRACTION", "Part of the TTFT target that queued prefill may use.", 1.0, 0.25, 0.75),
    ("SLACK_SPEND_S", "Seconds in which slack above the kept amount is spent.", _NEVER),
    ("SLACK_RECOVERY_S", "Seconds in which slack below the kept amount is earned back.", _NEVER),
    ("SLACK_ITLS", "Slack, in inter-token intervals, that live streams keep from batch work.", 5),
    ("MIN_SLACK_ITLS", "Slack that live streams keep from live jobs that are almost due.", 0, 2.5, 10),
    (
        "DECODE_FRACTION",
        "Part of an inter-token interval that decoding may use before batch jobs are held.",
        1.0,
        0.25,
        0.75,
    ),
    ("MIN_PREFILL_FRACTION", "Least part of engine time that paced prefill gets.", 0.001),
    ("COUNTS_VALID_S", "Age in seconds after which engine counters are no longer used.", _NEVER),
    ("RATIO_PRIOR_TOKENS", "Prompt tokens at a ratio of one in the ratio of estimated to computed prefill.", 1),
    ("INITIAL_PREFILL_TOKENS", "Bound on prefill tokens in flight before costs are known.", 10**6),
    ("KV_FRACTION", "Part of the KV capacity that is used.", 1.0, 0.9, 0.98),
    ("OUTPUT_WEIGHT", "Weight of the latest job in the mean output tokens.", 1.0),
    ("ATTAINMENT_WEIGHT", "Weight of the latest stream in the share of streams that met their target.", 1.0),
    (
        "HOLDING_PAYS",
        "Share of streams that meet their target above which holds are not bounded; removed: always bounded.",
        _NEVER,
        0.5,
        0.99,
    ),
)
_DIRECT_ENGINE_ROWS = _of(
    "inferry.scheduling.capacity.direct_engine",
    ("ATTENTION_TOKENS", "Context at which a prompt token costs twice as much as the first one.", _NEVER),
    ("WEIGHT_DECAY", "What one job leaves of the mean weight of the jobs before it.", 0.0, 0.96, 0.99),
    ("RECENT_JOBS", "Jobs of a lane whose waits in the modelled engine are remembered.", 1),
    ("WAIT_QUANTILE", "Quantile of these waits that bounds holds.", 0.999, 0.5, 0.975),
)
_HOLD_BOUND_ROWS = _of(
    "inferry.scheduling.hold_bound",
    ("HOLD_FACTOR", "Waits in the modelled engine after which a worker is used as it would be.", _NEVER, 1.0, 2.5),
    ("TURN_FACTOR", "Such waits after which the overdue job itself is next.", _NEVER, 1.25, 3.5),
)
_STEP_COSTS_ROWS = _of(
    _STEP_COSTS,
    ("SMOOTHING_S", "Smoothing of observed steps and tokens, in seconds.", 1e-6),
    ("MEMORY_S", "Memory of the least-squares sums, in seconds.", _NEVER),
    (
        "PRIOR_COSTS",
        "Calibrated costs of a step, an output token and a prompt token; removed: all alike.",
        (1.0, 1.0, 1.0),
        (50.0, 1.0, 1.0),
        (800.0, 16.0, 1.0),
    ),
    ("PRIOR_WEIGHT", "Weight of the calibrated costs in the least-squares fit.", 0.0),
)
_OVERLOAD_ROWS = _of(
    _OVERLOAD,
    (
        "LATE_FRACTION",
        "Part of the TTFT target after which a queued job counts as missed; removed: no overload rule.",
        _NEVER,
        0.7,
        1.0,
    ),
    ("MAX_PASSED_OVER_TTFTS", "TTFT targets after which a passed-over job has its place in fair order again.", _NEVER),
    ("REVIEW_FRACTION", "Period of the selection, as a part of the TTFT target.", 0.0),
    ("RATE_PERIODS", "Periods of observation before the prefill rate is used.", None),
    ("MAX_REVIEWED", "Jobs that one selection looks at.", 10**9),
)
_OTHER_ROWS = [
    *_of(
        "inferry.scheduling.queues.quantum",
        ("QUANTUM_TOKENS", "Burst of the prefill token bucket and grain of lane shares.", None),
    ),
    *_of(
        "inferry.scheduling.queues.lane_queue",
        ("PREPAID_TOKENS", "Service in order that counts against a lane's share.", 0),
    ),
    *_of(
        "inferry.scheduling.capacity.prefill_bucket",
        ("MAX_DEBT_S", "Debt, in seconds of the rate, that unpaced prefill may leave in the bucket.", 0.0),
        ("MAX_PACED_DEBT_S", "Debt, in seconds of the rate, that paced prefill may leave in the bucket.", _NEVER),
    ),
    *_of(
        _SIM,
        ("CAPACITY_INTERVAL_S", "Period in seconds of the capacity computation.", 0.01),
        ("ENGINE_COUNTS_INTERVAL_S", "Period in seconds of engine metrics.", 0.05),
    ),
    *_of(
        _PREEMPTION,
        ("MIN_PROGRESS_TOKENS", "Output tokens before a running job may be preempted.", 0),
        ("_MAX_EVICTIONS_PER_TICK", "Preemptions decided in one tick.", 10**6, 8, 256),
        ("_MAX_JOBS_PER_WORKER", "Jobs of a worker that are considered for preemption.", 10**6),
        ("_RETRY_ROUNDS", "Rounds that a queue waits after it found no job to preempt.", 0),
        only=("small",),
    ),
    *_of(
        "inferry.scheduling.queues.queued_job",
        ("MAX_PREEMPTIONS", "Times that one job may be preempted.", 10**9),
        only=("small",),
    ),
    *_of(_PREEMPTION, ("_MAX_WORKERS", "Workers that are considered for preemption.", 10**6, 1, 8), only=("fleet",)),
    *_of(
        "inferry.scheduling.placement.backfill",
        ("_LOOKAHEAD", "Jobs behind a blocked one that may be backfilled.", 0),
        only=("fleet",),
    ),
    *_of(
        "inferry.scheduling.worker_state",
        ("ALMOST_FULL", "Load of a worker that only lower lanes fill.", None, 0.5, 0.9999),
        only=("fleet",),
    ),
    *_of(
        _SIBLING_WINDOW,
        ("EWMA_ALPHA", "Weight of the latest prefix group in what is expected of the next.", None),
        ("RECOMPUTE_ALPHA", "Weight of the latest sibling in the observed recomputation.", None),
        ("MIN_SIBLINGS", "Siblings seen before recomputation is believed.", 1),
        ("MIN_BENEFIT_RATIO", "How much more a batching window must save than it costs.", 1.0, 1.5, 4.0),
        ("REPROBE_INTERVAL", "Windows after which one prefix group is not held.", 10**9),
        only=("fleet",),
    ),
    *_of(
        "inferry.scheduling.placement.cached_prefix",
        ("PREFIX_TOKENS_PER_SEQUENCE", "Cached tokens that outweigh one sequence of load.", 1),
        only=("fleet",),
    ),
    *_of(
        "inferry.scheduling.placement.worker_groups",
        ("LOAD_SLACK", "Load above the mean that affinity may give a worker.", 0.0),
        only=("fleet",),
    ),
    *_of(
        "inferry.scheduling.placement.rendezvous_hash",
        ("_RANKED_WORKERS", "Workers that a prefix hashes to.", 1),
        only=("fleet",),
    ),
    *_of(
        "inferry.scheduling.placement.prefix_index",
        ("_MAX_WORKERS", "Workers remembered for one prefix.", 1),
        only=("fleet",),
    ),
]

CONSTANTS = {
    one.key: replace(one, defaults=_BY_DEFAULT.get(one.key, ()))
    for one in (
        *_CONTROLLER_ROWS,
        *_STEP_COSTS_ROWS,
        *_DIRECT_ENGINE_ROWS,
        *_HOLD_BOUND_ROWS,
        *_OVERLOAD_ROWS,
        *_OTHER_ROWS,
    )
}

NOT_PLAYED = {
    "workers that pad (`BENCH=windows`)": (
        "scheduling.batching.pass_hold.PASS_FRACTION",
        "scheduling.batching.pass_hold.MIN_EXPECTED_FOLLOWERS",
        "scheduling.batching.pass_window.EWMA_ALPHA",
    ),
    "pauses of runs (`BENCH=sessions`)": (
        "scheduling.working_sets.MAX_KEEP_S",
        "scheduling.working_sets.MIN_KEEP_S",
        "scheduling.working_sets.MAX_TOOL_S",
        "scheduling.working_sets.TOOL_TIME_WEIGHT",
        "scheduling.working_sets.KEEP_FACTOR",
        "scheduling.working_sets.TOOL_TIME_FACTOR",
        "scheduling.working_sets.RAISE_FACTOR",
        "scheduling.working_sets.LOWER_FACTOR",
        "scheduling.working_sets.MAX_OVERCOMMIT",
        "scheduling.working_sets.MAX_MISSES",
    ),
    "all workers are in one group, so none is lent": ("scheduling.placement.borrowing.LEND_AFTER_S",),
    "jobs of a lane yield to it only where `may_preempt` names the lane itself (`BENCH=own_lane`)": (
        "scheduling.preemption.OVERRUN_FACTOR",
    ),
    "decision records only": ("scheduling.selection.REBIND_INTERVAL_S",),
    "the simulator tells the scheduler of every capacity": ("dispatch.capacity.MIN_RELATIVE_CHANGE",),
    "no queue is full here (`BENCH=overload`)": ("admission.queue_limiter.*",),
    "predicted waits (`BENCH=waits`)": (
        "prediction.wait_model.*",
        "prediction.drain_rates.*",
        "prediction.calibration.*",
    ),
    "the simulator counts prompt tokens exactly": ("prediction.prefix_hits.*", "prediction.token_ratio.*"),
    "bound memory or work, not latency": (
        "scheduling.batching.sibling_window.MAX_STATS",
        "scheduling.capacity.direct_engine.MAX_WAITING",
        "scheduling.overload._COMPACTION_THRESHOLD",
        "scheduling.placement.prefix_index._MAX_PREFIXES",
        "scheduling.queues.arrival_order._COMPACTION_THRESHOLD",
        "scheduling.queues.fair_queue.COMPACTION_THRESHOLD",
        "scheduling.queues.fair_share._SWEEP_THRESHOLD",
        "scheduling.queues.service_history._MAX_TENANTS",
        "scheduling.queues.timers._COMPACTION_THRESHOLD",
        "scheduling.sessions.MAX_DEPARTED",
    ),
    "arithmetic: rounding, a whole, the grain of a hash": (
        "scheduling.capacity.prefill_bucket._ROUNDING_TOKENS",
        "scheduling.capacity.step_costs._SWEEPS",
        "scheduling.capacity.step_costs._MIN_COST_S",
        "scheduling.placement.rendezvous_hash._SLOTS",
        "scheduling.placement.worker_groups._FULL",
        "scheduling.queues.bound_interval._MIN_S",
    ),
}
"""Constants that the workloads do not reach, or that are no tuning, by why."""
