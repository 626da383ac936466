"""Declarations of the metrics of features that a configuration may leave off: overflow, sessions, queued work."""

from inferry.observe.metric_spec import MetricSpec

FEATURE_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "inferry_overflow_jobs_total",
        "counter",
        "Jobs sent to a hosted worker for overflow, by what they would have missed on own workers: `deadline` or "
        "`target`.",
        ("reason",),
    ),
    MetricSpec(
        "inferry_overflow_refusals_total",
        "counter",
        "Jobs that stayed with own workers although they would be late, by the limit of overflow that kept them: "
        "`day_money_ceiling`, `run_money_ceiling` or `capacity`.",
        ("limit",),
    ),
    MetricSpec(
        "inferry_overflow_cost_total",
        "counter",
        "Cost of jobs that overflowed, in units of the currency.",
    ),
    MetricSpec(
        "inferry_prefills_total",
        "counter",
        "Prompts computed on workers of role `prefill`, by result: `handed_over`, or `failed`, after which the call "
        "was computed whole.",
        ("worker", "result"),
    ),
    MetricSpec(
        "inferry_resident_runs", "gauge", "Runs whose KV is kept on a worker for their next call (`sessions.pause`)."
    ),
    MetricSpec(
        "inferry_paused_calls", "gauge", "Calls that wait because their run is paused; part of the queue depth."
    ),
    MetricSpec("inferry_session_pauses_total", "counter", "Calls whose run was paused, those that wait included."),
    MetricSpec(
        "inferry_session_pause_seconds_total", "counter", "Time that calls waited because their run was paused."
    ),
    MetricSpec(
        "inferry_work_queue_depth",
        "gauge",
        "Batch items and async jobs in the queue that gateways share, those that run included. With `cluster.redis` "
        "only.",
    ),
    MetricSpec("inferry_pull_workers", "gauge", "Pull-workers seen in the last 10 seconds. With `cluster.redis` only."),
    MetricSpec(
        "inferry_work_in_flight", "gauge", "Batch items and async jobs of the shared queue that this process holds."
    ),
    MetricSpec(
        "inferry_work_queue_errors_total",
        "counter",
        "Requests to the shared queue that failed because Redis did not answer or refused them.",
    ),
    MetricSpec(
        "inferry_work_deliveries_total",
        "counter",
        "Deliveries of the shared queue to this process: taken, claimed from a silent holder, done, lost to another "
        "holder, put back, or dead letters.",
        ("result",),
    ),
    MetricSpec("inferry_async_jobs_open", "gauge", "Async jobs that have not ended."),
    MetricSpec(
        "inferry_async_jobs_ended_total", "counter", "Async jobs ended by this process, by status.", ("status",)
    ),
    MetricSpec("inferry_callbacks_open", "gauge", "Callbacks of ended async jobs that are not delivered."),
    MetricSpec(
        "inferry_callback_attempts_total",
        "counter",
        "Attempts to deliver callbacks: delivered, to be retried, or failed for good.",
        ("result",),
    ),
)
