"""The metrics by name: the only place where one is declared. `metrics` fills them in, the reference page lists them."""

from typing import Literal, NamedTuple


class MetricSpec(NamedTuple):
    """One row of the table. `buckets` are upper bounds, without +Inf; only histograms have them."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
_ITL = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

METRIC_TABLE: tuple[MetricSpec, ...] = (
    MetricSpec("inferry_queue_depth", "gauge", "Jobs that wait in the gateway.", ("lane",)),
    MetricSpec(
        "inferry_queue_wait_seconds",
        "histogram",
        "From a job's arrival until it is sent to a worker; time held for company is part of it.",
        ("lane",),
        _WAIT_BUCKETS,
    ),
    MetricSpec("inferry_batch_size", "histogram", "Jobs sent to a worker together.", ("worker",), _BATCH_SIZE_BUCKETS),
    MetricSpec("inferry_plans_total", "counter", "Plans formed, by why they were formed then.", ("reason",)),
    MetricSpec(
        "inferry_jobs_total", "counter", "Attempts that ended, by how they ended.", ("lane", "model", "outcome")
    ),
    MetricSpec(
        "inferry_attempt_retries_total",
        "counter",
        "Attempts that were lost or stopped and whose job went on, by why; a job that starts again is not resumed.",
        ("reason", "resumed"),
    ),
    MetricSpec(
        "inferry_wasted_tokens_total",
        "counter",
        "Tokens computed for attempts that did not complete, less what the job could go on from: prompt less cached, "
        "and output.",
        ("outcome", "lane"),
    ),
    MetricSpec(
        "inferry_worker_usage_corrections_total",
        "counter",
        "Attempts whose worker reported a usage that cannot be true: negative, beyond the context or the output limit.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_shared_jobs_total",
        "counter",
        "Jobs that got another's answer instead of an execution of their own: of an identical one in flight, of the "
        "same call made again while it was in flight, or after its end.",
        ("kind",),
    ),
    MetricSpec(
        "inferry_pending_retries",
        "gauge",
        "Calls that were refused because a queue was full, were told when to come again, and have not yet.",
        ("lane",),
    ),
    MetricSpec(
        "inferry_fairness_index",
        "gauge",
        "Jain's index of tokens served over `tenants.<name>.weight`, across tenants with jobs in the lane: 1 is an "
        "even share, 1/n is all to one of n. Counted since each tenant last had none.",
        ("lane",),
    ),
    MetricSpec("inferry_queued_bytes", "gauge", "Bytes of the bodies of jobs that wait in the gateway."),
    MetricSpec(
        "inferry_shadow_refusals_total",
        "counter",
        "Calls that a limit would have refused, of tenants whose limits are only reported, by that limit.",
        ("limit",),
    ),
    MetricSpec(
        "inferry_budget_overrun_tokens_total",
        "counter",
        "Tokens that engines used beyond what was leased from a budget, where no room was left to charge them.",
    ),
    MetricSpec("inferry_errors_total", "counter", "Refusals and failures, by public error code.", ("code",)),
    MetricSpec(
        "inferry_tokens_total",
        "counter",
        "Tokens of attempts that ended: prompt (cached ones included), cached and output.",
        ("kind", "model", "lane"),
    ),
    MetricSpec(
        "inferry_time_to_first_token_seconds",
        "histogram",
        "From a job's arrival until its first token.",
        ("lane", "model"),
        _TTFT_BUCKETS,
    ),
    MetricSpec(
        "inferry_inter_token_latency_seconds", "histogram", "Between one token of a job and the next.", ("lane",), _ITL
    ),
    MetricSpec(
        "inferry_slo_attainment_total",
        "counter",
        "Completed attempts in lanes that promise a first token and a gap, by whether every token attained it.",
        ("lane", "attained"),
    ),
    MetricSpec(
        "inferry_wait_prediction_coverage_ratio",
        "gauge",
        "Part of the jobs, of late, that waited no longer than the P90 predicted when they came; 0.9 is what it means.",
        ("lane",),
    ),
    MetricSpec(
        "inferry_output_prediction_log_error",
        "gauge",
        "Mean absolute logarithm of output tokens written over expected, of late; 0.69 is a factor of two.",
    ),
    MetricSpec("inferry_jobs_in_flight", "gauge", "Jobs that were let in and have not ended, queued or sent."),
    MetricSpec("inferry_open_streams", "gauge", "Streams that have a reader."),
    MetricSpec("inferry_merged_deltas_total", "counter", "Deltas joined to the one before for a slow reader."),
    MetricSpec(
        "inferry_worker_up", "gauge", "1 while the worker can generate, 0 while it starts or is down.", ("worker",)
    ),
    MetricSpec("inferry_worker_phase", "gauge", "1 for the phase that the worker is in.", ("worker", "phase")),
    MetricSpec(
        "inferry_worker_breaker_state",
        "gauge",
        "1 for the state of the worker's circuit breaker: it gets work only while that is closed.",
        ("worker", "state"),
    ),
    MetricSpec(
        "inferry_worker_breaker_opens_total",
        "counter",
        "How often the worker was taken out: it lost several jobs, or went down.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_worker_capacity_share",
        "gauge",
        "Part of the worker's room that may be used; less than 1 for a while after it came back.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_hedged_retries_total",
        "counter",
        "Calls retried on another worker because this one was silent and their first token overdue.",
        ("worker",),
    ),
    MetricSpec("inferry_worker_running_sequences", "gauge", "Sequences the worker says it runs.", ("worker",)),
    MetricSpec("inferry_worker_waiting_sequences", "gauge", "Sequences that wait inside the worker.", ("worker",)),
    MetricSpec("inferry_worker_kv_used_tokens", "gauge", "Tokens in the worker's KV cache.", ("worker",)),
    MetricSpec("inferry_worker_kv_capacity_tokens", "gauge", "Tokens that fit the worker's KV cache.", ("worker",)),
    MetricSpec(
        "inferry_ledger_up",
        "gauge",
        "1 while the ledger's database is the file that its address names, 0 while that is gone or unusable.",
    ),
    MetricSpec("inferry_ledger_entries_written_total", "counter", "Entries the ledger has acknowledged."),
    MetricSpec("inferry_ledger_entries_dropped_total", "counter", "Entries that will never reach the ledger."),
)
