"""Declarations of all metrics. `metrics` records them; the reference page is generated from this table."""

from inferry.observe.feature_metrics import FEATURE_METRICS
from inferry.observe.metric_spec import (
    BATCH_SIZE_BUCKETS,
    BY_BATCH_BUCKETS,
    E2E_BUCKETS,
    ITL_BUCKETS,
    LOOP_BUCKETS,
    TICK_BUCKETS,
    TTFT_BUCKETS,
    WAIT_BUCKETS,
    MetricSpec,
)

METRIC_TABLE: tuple[MetricSpec, ...] = (
    *FEATURE_METRICS,
    MetricSpec("inferry_queue_depth", "gauge", "Jobs queued in the gateway.", ("lane", "model")),
    MetricSpec(
        "inferry_queue_wait_seconds",
        "histogram",
        "Time from arrival until the job is sent to a worker, batching window included.",
        ("lane", "model"),
        WAIT_BUCKETS,
    ),
    MetricSpec(
        "inferry_batching_wait_seconds",
        "histogram",
        "Part of the queue wait in which the job was held for others to join its batch, or its run was paused. Counts "
        "held jobs only.",
        ("lane", "model"),
        WAIT_BUCKETS,
    ),
    MetricSpec(
        "inferry_binding_limit_total",
        "counter",
        "Jobs sent after a wait for capacity, by the limit that bound their queue last and the worker with that limit; "
        "`none` if no worker was up.",
        ("worker", "limit"),
    ),
    MetricSpec("inferry_batch_size", "histogram", "Jobs per plan sent to a worker.", ("worker",), BATCH_SIZE_BUCKETS),
    MetricSpec("inferry_plans_total", "counter", "Plans sent, by release reason.", ("reason",)),
    MetricSpec(
        "inferry_padded_prompt_tokens_total",
        "counter",
        "Expected prompt tokens of plans sent to workers that pad, without padding.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_padding_tokens_total",
        "counter",
        "Padding of plans sent to workers that pad: tokens computed beyond the prompts because every prompt of a pass "
        "is as long as the longest.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_worker_step_tokens_total",
        "counter",
        "Tokens that the steps of an embedded engine computed: `prompt`, `decode` (one per sequence and step), and in "
        "padded passes `prompt_padding` and `decode_padding` (rows of sequences that had ended).",
        ("worker", "kind"),
    ),
    MetricSpec("inferry_tick_seconds", "histogram", "Time that the scheduler takes for one tick.", (), TICK_BUCKETS),
    MetricSpec("inferry_tick_jobs", "histogram", "Jobs planned by one tick.", (), (0, *BATCH_SIZE_BUCKETS)),
    MetricSpec(
        "inferry_event_loop_lag_seconds",
        "histogram",
        "Delay of a timer of the event loop beyond its due time, measured ten times a second.",
        (),
        LOOP_BUCKETS,
    ),
    MetricSpec(
        "inferry_http_requests_total",
        "counter",
        "Answered HTTP requests by endpoint and class of status. A client that disconnects before the end counts as "
        "4xx (499).",
        ("endpoint", "status"),
    ),
    MetricSpec("inferry_jobs_total", "counter", "Finished attempts by outcome.", ("lane", "model", "outcome")),
    MetricSpec(
        "inferry_attempt_retries_total",
        "counter",
        "Lost or preempted attempts whose job was retried, by reason and by whether it resumed or restarted.",
        ("reason", "resumed"),
    ),
    MetricSpec(
        "inferry_wasted_tokens_total",
        "counter",
        "Uncached prompt tokens and output tokens of unfinished attempts, less what a resumed job could reuse.",
        ("outcome", "lane"),
    ),
    MetricSpec(
        "inferry_worker_usage_corrections_total",
        "counter",
        "Attempts with an implausible usage reported by the worker: negative, or beyond context or output limit.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_shared_jobs_total",
        "counter",
        "Jobs answered by another job's execution: an identical call in flight, or a repetition of the call during or "
        "after it.",
        ("kind",),
    ),
    MetricSpec(
        "inferry_pending_retries",
        "gauge",
        "Calls refused by a full queue whose retry slot is still open.",
        ("lane",),
    ),
    MetricSpec(
        "inferry_fairness_index",
        "gauge",
        "Jain's index of weighted tokens served to the tenants with jobs in the lane: 1 is a fair share, 1/n means one "
        "of n tenants gets everything. Tokens are counted since the tenant was last idle.",
        ("lane",),
    ),
    MetricSpec(
        "inferry_tenant_fairness_index",
        "gauge",
        "Jain's index of the weighted tokens of calls that ended in the last 5 minutes, over all lanes and tenants "
        "with such calls. Tenants with little demand lower it.",
    ),
    MetricSpec("inferry_active_tenants", "gauge", "Tenants with calls that ended in the last 5 minutes."),
    MetricSpec(
        "inferry_queue_limit", "gauge", "Maximum number of queued jobs (`lanes.<lane>.queue_limit`).", ("lane",)
    ),
    MetricSpec("inferry_queued_bytes", "gauge", "Bytes of request bodies of queued jobs."),
    MetricSpec(
        "inferry_limit_refusals_total", "counter", "Calls refused by a tenant's or key's limit, by limit.", ("limit",)
    ),
    MetricSpec(
        "inferry_shadow_refusals_total",
        "counter",
        "Calls of tenants in shadow mode that a limit would have refused, by limit.",
        ("limit",),
    ),
    MetricSpec(
        "inferry_budget_overrun_tokens_total",
        "counter",
        "Tokens used by engines beyond a budget's leases that could not be charged to it.",
    ),
    MetricSpec(
        "inferry_budget_overrun_cost_total",
        "counter",
        "Cost beyond a budget's leases that could not be charged to it, in units of the currency.",
    ),
    MetricSpec(
        "inferry_budget_burn_ratio",
        "gauge",
        "Highest ratio of spent part of a ceiling to elapsed part of its day or month, over all tenants and keys; "
        "above 1 the ceiling is reached before the period ends. The elapsed part counts as at least 0.1.",
        ("period",),
    ),
    MetricSpec(
        "inferry_run_budget_spent_ratio",
        "gauge",
        "Highest spent part of a run's ceiling, over the 1000 runs used most recently.",
    ),
    MetricSpec("inferry_errors_total", "counter", "Refusals and failures by error code.", ("code",)),
    MetricSpec(
        "inferry_tokens_total",
        "counter",
        "Tokens of finished attempts: prompt (cached included), cached and output.",
        ("kind", "model", "lane"),
    ),
    MetricSpec(
        "inferry_cost_total",
        "counter",
        "Cost of ended jobs in units of the currency of `prices`; models without a price cost nothing.",
        ("model", "lane"),
    ),
    MetricSpec(
        "inferry_prefix_cache_hit_ratio",
        "gauge",
        "Cached part of the prompt tokens of attempts that ended in the last 5 minutes; without such tokens there is "
        "no value.",
        ("model",),
    ),
    MetricSpec(
        "inferry_time_to_first_token_seconds",
        "histogram",
        "Time from arrival to the first token.",
        ("lane", "model"),
        TTFT_BUCKETS,
    ),
    MetricSpec(
        "inferry_inter_token_latency_seconds",
        "histogram",
        "Time between two tokens of a stream.",
        ("lane", "model"),
        ITL_BUCKETS,
    ),
    MetricSpec(
        "inferry_e2e_latency_seconds",
        "histogram",
        "Time from arrival to the end of completed jobs.",
        ("lane", "model"),
        E2E_BUCKETS,
    ),
    MetricSpec(
        "inferry_time_to_first_token_by_batch_seconds",
        "histogram",
        "Time from arrival to the first token of completed jobs, by mean number of sequences that ran on the worker "
        "beside them, themselves included.",
        ("lane", "model", "batch"),
        BY_BATCH_BUCKETS,
    ),
    MetricSpec(
        "inferry_e2e_latency_by_batch_seconds",
        "histogram",
        "Time from arrival to the end of completed jobs, by mean number of sequences as above.",
        ("lane", "model", "batch"),
        BY_BATCH_BUCKETS,
    ),
    MetricSpec("inferry_slo_ttft_target_seconds", "gauge", "The lane's target for the first token.", ("lane",)),
    MetricSpec("inferry_slo_itl_target_seconds", "gauge", "The lane's target between two tokens.", ("lane",)),
    MetricSpec(
        "inferry_slo_attainment_total",
        "counter",
        "Completed attempts in lanes with SLO targets, by whether every token met them.",
        ("lane", "model", "attained"),
    ),
    MetricSpec(
        "inferry_wait_prediction_coverage_ratio",
        "gauge",
        "Fraction of recent jobs that waited no longer than their predicted P90; ideally 0.9.",
        ("lane",),
    ),
    MetricSpec(
        "inferry_output_prediction_log_error",
        "gauge",
        "Mean absolute log of actual over predicted output tokens of recent jobs; 0.69 is a factor of two.",
    ),
    MetricSpec(
        "inferry_desired_workers",
        "gauge",
        "Workers that the group should have, as `GET /admin/scale` says: from work waiting and capacity in use. Of "
        "gateways that share their workers, only the owner exports it.",
        ("group",),
    ),
    MetricSpec(
        "inferry_waiting_work_seconds",
        "gauge",
        "Queued work for the group, in seconds of one engine.",
        ("group",),
    ),
    MetricSpec("inferry_jobs_in_flight", "gauge", "Admitted jobs that have not ended."),
    MetricSpec("inferry_open_streams", "gauge", "Open client streams."),
    MetricSpec("inferry_merged_deltas_total", "counter", "Deltas merged because the client reads slowly."),
    MetricSpec("inferry_worker_up", "gauge", "1 if the worker is ready, 0 if it is starting or down.", ("worker",)),
    MetricSpec("inferry_worker_phase", "gauge", "1 for the worker's current phase.", ("worker", "phase")),
    MetricSpec(
        "inferry_worker_breaker_state",
        "gauge",
        "1 for the current state of the worker's circuit breaker; work is sent only while it is closed.",
        ("worker", "state"),
    ),
    MetricSpec(
        "inferry_worker_breaker_opens_total",
        "counter",
        "Times the worker's circuit breaker opened.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_worker_capacity_share",
        "gauge",
        "Fraction of the worker's capacity in use limits; below 1 during slow start.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_hedged_retries_total",
        "counter",
        "Calls retried elsewhere because the worker was silent and the first token overdue.",
        ("worker",),
    ),
    MetricSpec("inferry_worker_running_sequences", "gauge", "Running sequences reported by the worker.", ("worker",)),
    MetricSpec("inferry_worker_waiting_sequences", "gauge", "Waiting sequences reported by the worker.", ("worker",)),
    MetricSpec("inferry_worker_kv_used_tokens", "gauge", "KV cache tokens in use on the worker.", ("worker",)),
    MetricSpec(
        "inferry_worker_kv_predicted_tokens",
        "gauge",
        "Predicted KV peak of the calls on the worker in tokens, as they are packed by `workers[].kv_packing`.",
        ("worker",),
    ),
    MetricSpec("inferry_worker_kv_capacity_tokens", "gauge", "KV cache size of the worker in tokens.", ("worker",)),
    MetricSpec(
        "inferry_engine_kv_blocks",
        "gauge",
        "KV cache blocks of an embedded engine by state: held by sequences, kept for the next call of a run, cached, "
        "empty. All but held ones count as free.",
        ("worker", "state"),
    ),
    MetricSpec(
        "inferry_engine_kv_fragmentation_ratio",
        "gauge",
        "Part of the range from the first to the last held KV block of an embedded engine that is not held.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_engine_prefix_cache_queries_total",
        "counter",
        "Prompt tokens that an embedded engine looked up in its prefix cache, since the engine's start.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_engine_prefix_cache_hits_total",
        "counter",
        "Prompt tokens that an embedded engine found in its prefix cache, since the engine's start.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_gpu_seconds_total",
        "counter",
        "GPU-seconds of the worker by kind: work, cancelled, preempted, recomputed, idle, unattributed.",
        ("worker", "kind"),
    ),
    MetricSpec(
        "inferry_worker_gpu_utilization_ratio",
        "gauge",
        "Fraction of the last 5 seconds in which the worker's GPUs were busy.",
        ("worker",),
    ),
    MetricSpec(
        "inferry_redis_up",
        "gauge",
        "1 if Redis has answered the last exchange of shared limits. Gateways with `cluster.redis` only.",
    ),
    MetricSpec("inferry_limit_waits_total", "counter", "Jobs that waited for a grant of a shared limit."),
    MetricSpec("inferry_limit_wait_seconds_total", "counter", "Time that jobs waited for grants of shared limits."),
    MetricSpec(
        "inferry_limit_generation",
        "gauge",
        "How often the shared limits were built from the ledger: 1 at first, then once per loss of Redis's state. -1 "
        "while it is unknown.",
    ),
    MetricSpec("inferry_domain_owner", "gauge", "1 at the gateway that owns the workers. With `cluster.redis` only."),
    MetricSpec("inferry_domain_epoch", "gauge", "Epoch of the owner of the workers, as this gateway knows it."),
    MetricSpec(
        "inferry_ledger_up",
        "gauge",
        "1 if the ledger's database answers, 0 if it does not, or if its file is gone or unusable.",
    ),
    MetricSpec("inferry_ledger_entries_written_total", "counter", "Entries written to the ledger."),
    MetricSpec(
        "inferry_ledger_entries_dropped_total", "counter", "Entries lost because the ledger could not be written."
    ),
    MetricSpec("inferry_trace_spans_exported_total", "counter", "Spans that the trace collector accepted."),
    MetricSpec("inferry_trace_spans_failed_total", "counter", "Spans that the trace collector did not accept."),
    MetricSpec("inferry_traces_dropped_total", "counter", "Traces dropped because the export queue was full."),
    MetricSpec("inferry_batches_open", "gauge", "Batches that are not finished."),
    MetricSpec("inferry_batches_ended_total", "counter", "Batches finished by this process, by status.", ("status",)),
    MetricSpec("inferry_storage_bytes", "gauge", "Bytes of stored content, as counted for quotas.", ("kind",)),
    MetricSpec("inferry_database_bytes", "gauge", "Size of the ledger's database, stored content included."),
    MetricSpec("inferry_alerts", "gauge", "Alerts evaluated in the gateway.", ("alert", "severity", "state")),
    MetricSpec(
        "inferry_alert_webhooks_total",
        "counter",
        "Attempts to send alerts to the webhook: delivered, to be retried, failed for good, or dropped unsent.",
        ("result",),
    ),
)
