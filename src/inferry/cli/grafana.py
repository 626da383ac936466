"""Grafana dashboards of the gateway's metrics, as the JSON that Grafana imports. Pure."""

from typing import Any, Literal, NamedTuple

COLUMNS = 24
WIDTH, HEIGHT = 8, 8
_INSTANCE = 'instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Query(NamedTuple):
    """A query and the name of its series. `$i` stands for the chosen instances, `$r` for the window of a rate."""

    text: str
    legend: str

    @property
    def promql(self) -> str:
        return self.text.replace("$i", _INSTANCE).replace("$r", "$__rate_interval")


class Panel(NamedTuple):
    """`unit` is a unit of Grafana. `stacked`: the series are parts of one sum."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    help: str = ""


class Dashboard(NamedTuple):
    name: str
    title: str
    panels: tuple[Panel, ...]


def _quantiles(name: str, by: str, *qs: float) -> tuple[Query, ...]:
    return tuple(
        Query(
            f"histogram_quantile({q:g}, sum by ({by}, le) (rate({name}_bucket{{$i}}[$r])))",
            f"{{{{{by}}}}} p{q * 100:g}",
        )
        for q in qs
    )


def _rates(name: str, by: str) -> tuple[Query, ...]:
    return (Query(f"sum by ({by}) (rate({name}{{$i}}[$r]))", f"{{{{{by}}}}}"),)


def _sums(name: str, by: str) -> tuple[Query, ...]:
    return (Query(f"sum by ({by}) ({name}{{$i}})", f"{{{{{by}}}}}"),)


def _value(name: str, legend: str) -> Query:
    return Query(f"sum({name}{{$i}})", legend)


_ATTAINED = Query(
    'sum by (lane) (rate(inferry_slo_attainment_total{attained="true",$i}[$r])) '
    "/ sum by (lane) (rate(inferry_slo_attainment_total{$i}[$r]))",
    "{{lane}}",
)
_UTILISATION = Query("avg by (worker) (inferry_worker_gpu_utilization_ratio{$i})", "{{worker}}")
_COST = Query("3600 * sum by (model) (rate(inferry_cost_total{$i}[$r]))", "{{model}}")
_MEAN_BATCH = Query(
    "sum by (worker) (rate(inferry_batch_size_sum{$i}[$r])) / sum by (worker) (rate(inferry_batch_size_count{$i}[$r]))",
    "{{worker}}",
)
_PADDING, _PADDED = (
    f"sum by (worker) (rate(inferry_{name}_tokens_total{{$i}}[$r]))" for name in ("padding", "padded_prompt")
)
_KV_CAPACITY = "sum by (worker) (inferry_worker_kv_capacity_tokens{$i})"
_TTFT, _E2E = "inferry_time_to_first_token_seconds", "inferry_e2e_latency_seconds"

OVERVIEW = Dashboard(
    "inferry-fleet",
    "Inferry: fleet",
    (
        Panel("Firing alerts", "none", (Query('sum(inferry_alerts{state="firing",$i})', "firing"),), "stat"),
        Panel("Workers up", "none", (_value("inferry_worker_up", "up"),), "stat"),
        Panel("Jobs in flight", "none", (_value("inferry_jobs_in_flight", "jobs"),), "stat"),
        Panel("SLO attainment", "percentunit", (_ATTAINED,)),
        Panel("Time to first token, p95", "s", _quantiles(_TTFT, "lane", 0.95)),
        Panel("End to end, p95", "s", _quantiles(_E2E, "lane", 0.95)),
        Panel("Requests", "reqps", _rates("inferry_http_requests_total", "status"), stacked=True),
        Panel("Queue depth", "none", _sums("inferry_queue_depth", "lane"), stacked=True),
        Panel("GPU utilisation", "percentunit", (_UTILISATION,)),
        Panel("Tokens per second", "none", _rates("inferry_tokens_total", "kind")),
        Panel("Cost per hour", "none", (_COST,), stacked=True, help="In units of the currency of `prices`."),
        Panel("Errors", "ops", _rates("inferry_errors_total", "code")),
        Panel(
            "Event-loop lag",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (le) (rate(inferry_event_loop_lag_seconds_bucket{$i}[$r])))", "p99"
                ),
            ),
        ),
        Panel(
            "Scheduler tick",
            "s",
            (
                Query("histogram_quantile(0.99, sum by (le) (rate(inferry_tick_seconds_bucket{$i}[$r])))", "p99"),
                Query("sum(rate(inferry_tick_seconds_sum{$i}[$r]))", "part of one core"),
            ),
        ),
        Panel(
            "Process",
            "none",
            (
                Query("sum(rate(process_cpu_seconds_total{$i}[$r]))", "cores"),
                Query("sum(process_resident_memory_bytes{$i}) / 1e9", "memory, GB"),
            ),
        ),
    ),
)

LANES = Dashboard(
    "inferry-lanes",
    "Inferry: lanes and SLO",
    (
        Panel("SLO attainment", "percentunit", (_ATTAINED,)),
        Panel(
            "Time to first token against its target",
            "s",
            (
                *_quantiles(_TTFT, "lane", 0.5, 0.95),
                Query("max by (lane) (inferry_slo_ttft_target_seconds{$i})", "{{lane}} target"),
            ),
        ),
        Panel(
            "Inter-token latency against its target",
            "s",
            (
                *_quantiles("inferry_inter_token_latency_seconds", "lane", 0.5, 0.95),
                Query("max by (lane) (inferry_slo_itl_target_seconds{$i})", "{{lane}} target"),
            ),
        ),
        Panel("Queue wait", "s", _quantiles("inferry_queue_wait_seconds", "lane", 0.5, 0.95)),
        Panel("Batching wait, p95", "s", _quantiles("inferry_batching_wait_seconds", "lane", 0.95)),
        Panel(
            "Queue as a part of its limit",
            "percentunit",
            (Query("sum by (lane) (inferry_queue_depth{$i}) / sum by (lane) (inferry_queue_limit{$i})", "{{lane}}"),),
        ),
        Panel(
            "First token by size of the engine's batch, p95",
            "s",
            _quantiles("inferry_time_to_first_token_by_batch_seconds", "batch", 0.95),
        ),
        Panel(
            "End to end by size of the engine's batch, p95",
            "s",
            _quantiles("inferry_e2e_latency_by_batch_seconds", "batch", 0.95),
        ),
        Panel("Plans by release reason", "ops", _rates("inferry_plans_total", "reason"), stacked=True),
        Panel("Ended attempts", "ops", _rates("inferry_jobs_total", "outcome"), stacked=True),
        Panel(
            "Jain's index of the tenants that wait",
            "none",
            (Query("avg by (lane) (inferry_fairness_index{$i})", "{{lane}}"),),
        ),
        Panel(
            "Predicted waits that held",
            "percentunit",
            (Query("avg by (lane) (inferry_wait_prediction_coverage_ratio{$i})", "{{lane}}"),),
            help="Ideally 0.9.",
        ),
    ),
)

WORKERS = Dashboard(
    "inferry-workers",
    "Inferry: workers and capacity",
    (
        Panel("Up", "none", _sums("inferry_worker_up", "worker")),
        Panel("GPU utilisation", "percentunit", (_UTILISATION,)),
        Panel(
            "GPU time",
            "percentunit",
            (Query("sum by (kind) (rate(inferry_gpu_seconds_total{$i}[$r]))", "{{kind}}"),),
            stacked=True,
            help="GPUs by what they worked for.",
        ),
        Panel("Running sequences", "none", _sums("inferry_worker_running_sequences", "worker")),
        Panel("Sequences queued in the engine", "none", _sums("inferry_worker_waiting_sequences", "worker")),
        Panel(
            "KV cache",
            "percentunit",
            (
                Query(f"sum by (worker) (inferry_worker_kv_used_tokens{{$i}}) / {_KV_CAPACITY}", "{{worker}} used"),
                Query(
                    f"sum by (worker) (inferry_worker_kv_predicted_tokens{{$i}}) / {_KV_CAPACITY}",
                    "{{worker}} predicted peak",
                ),
            ),
        ),
        Panel("Jobs per plan", "none", (_MEAN_BATCH,)),
        Panel(
            "Padding as a part of computed prompt tokens",
            "percentunit",
            (Query(f"{_PADDING} / ({_PADDING} + {_PADDED})", "{{worker}}"),),
        ),
        Panel("Limit that bound a decision", "ops", _rates("inferry_binding_limit_total", "limit"), stacked=True),
        Panel("Share of the capacity in use limits", "percentunit", _sums("inferry_worker_capacity_share", "worker")),
        Panel("Circuit breaker opened", "ops", _rates("inferry_worker_breaker_opens_total", "worker")),
        Panel("Lost or preempted attempts", "ops", _rates("inferry_attempt_retries_total", "reason"), stacked=True),
        Panel("Wasted tokens", "none", _rates("inferry_wasted_tokens_total", "outcome"), stacked=True),
        Panel(
            "Prefix-cache hit ratio",
            "percentunit",
            (Query("avg by (model) (inferry_prefix_cache_hit_ratio{$i})", "{{model}}"),),
        ),
        Panel("Hedged retries", "ops", _rates("inferry_hedged_retries_total", "worker")),
    ),
)

TENANTS = Dashboard(
    "inferry-tenants",
    "Inferry: tenants and cost",
    (
        Panel("Cost per hour by model", "none", (_COST,), stacked=True, help="In units of the currency of `prices`."),
        Panel(
            "Cost per hour by lane",
            "none",
            (Query("3600 * sum by (lane) (rate(inferry_cost_total{$i}[$r]))", "{{lane}}"),),
            stacked=True,
        ),
        Panel("Tokens per second by model", "none", _rates("inferry_tokens_total", "model")),
        Panel("Active tenants", "none", (_value("inferry_active_tenants", "tenants"),)),
        Panel(
            "Jain's index over tenants, last 5 minutes",
            "none",
            (Query("avg(inferry_tenant_fairness_index{$i})", "fairness"),),
        ),
        Panel(
            "Budgets ahead of their period",
            "none",
            (
                Query("max by (period) (inferry_budget_burn_ratio{$i})", "{{period}}"),
                Query("max(inferry_run_budget_spent_ratio{$i})", "run, part spent"),
            ),
            help="Above 1 a ceiling is reached before its period ends.",
        ),
        Panel("Refused by limit", "ops", _rates("inferry_limit_refusals_total", "limit"), stacked=True),
        Panel("Refused by limit, shadow mode", "ops", _rates("inferry_shadow_refusals_total", "limit"), stacked=True),
        Panel(
            "Tokens beyond budgets",
            "none",
            (Query("sum(rate(inferry_budget_overrun_tokens_total{$i}[$r]))", "tokens/s"),),
        ),
        Panel(
            "Stored work that is open",
            "none",
            (
                _value("inferry_batches_open", "batches"),
                _value("inferry_async_jobs_open", "async jobs"),
                _value("inferry_callbacks_open", "callbacks"),
            ),
        ),
        Panel("Callback attempts", "ops", _rates("inferry_callback_attempts_total", "result"), stacked=True),
        Panel(
            "Stored bytes",
            "bytes",
            (*_sums("inferry_storage_bytes", "kind"), _value("inferry_database_bytes", "database")),
        ),
        Panel(
            "Ledger",
            "ops",
            (
                Query("sum(rate(inferry_ledger_entries_written_total{$i}[$r]))", "written"),
                Query("sum(rate(inferry_ledger_entries_dropped_total{$i}[$r]))", "dropped"),
            ),
        ),
        Panel("Shared executions", "ops", _rates("inferry_shared_jobs_total", "kind"), stacked=True),
        Panel("Requests by endpoint", "reqps", _rates("inferry_http_requests_total", "endpoint"), stacked=True),
    ),
)

DASHBOARDS = (OVERVIEW, LANES, WORKERS, TENANTS)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["inferry"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(inferry_jobs_in_flight, instance)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Gateway",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": "instance"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    per_row = COLUMNS // WIDTH
    custom = {"fillOpacity": 25 if panel.stacked else 8, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": {"x": number % per_row * WIDTH, "y": number // per_row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": one.promql, "legendFormat": one.legend}
            for index, one in enumerate(panel.queries)
        ],
    }
