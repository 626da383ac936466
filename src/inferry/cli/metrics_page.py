"""The reference page of metrics, from their table."""

from collections.abc import Iterator

from inferry.cli.markdown import attribute_docs, codes, page, table
from inferry.domain import lanes, ledger
from inferry.domain.decisions import FLEET_LIMITS, WORKER_LIMITS
from inferry.domain.lanes import Lane
from inferry.domain.ledger import GpuTimeKind
from inferry.observe.metric_table import METRIC_TABLE
from inferry.observe.metrics import BATCH_SIZES
from inferry.observe.request_counts import STATUS_CLASSES
from inferry.observe.watched_states import LIMITS


def metrics_page() -> str:
    rows = [(f"`{one.name}`", one.kind, codes(one.labels), one.help) for one in METRIC_TABLE]
    buckets = [
        (f"`{one.name}`", ", ".join(f"{bound:g}" for bound in one.buckets)) for one in METRIC_TABLE if one.buckets
    ]
    return page(
        "Metrics",
        "src/inferry/observe/metric_table.py",
        "`GET /metrics` returns the metrics below in the Prometheus text format and, where available, those of the "
        "process (`process_*`). What to look at: [Monitor the gateway](../howto/monitoring.md).",
        table(("name", "kind", "labels", "meaning"), rows),
        "## Labels",
        "Values are bounded. Models and workers come from the configuration; any other value is `other`. No metric has "
        "a tenant, a run or a key as its label: `/metrics` needs no key, and their number is not bounded. Figures of "
        "tenants are in the ledger (`inferry ledger`) and under `/admin/tenants`.",
        table(("label", "values"), _label_values()),
        "## Release reasons",
        table(("reason", "meaning"), _release_reasons()),
        "## Histogram buckets",
        table(("name", "upper bounds, and +Inf"), buckets),
    )


def _label_values() -> Iterator[tuple[str, str]]:
    yield "`lane`", codes(lane.name for lane in Lane)
    yield "`batch`", codes(BATCH_SIZES)
    yield "`endpoint`", "a path of the [HTTP API](http.md) that stands for all paths below it, or `other`"
    yield "`status` of requests", codes(STATUS_CLASSES)
    yield "`limit` of refusals", codes(LIMITS)
    yield "`limit` that bound a decision", codes((*WORKER_LIMITS, *FLEET_LIMITS))
    yield "`period`", codes(("day", "month"))
    yield "`outcome`", codes(outcome.value for outcome in ledger.Outcome)
    yield "`kind` of tokens", codes(("prompt", "cached", "output"))
    yield "`kind` of GPU time", codes(kind.value for kind in GpuTimeKind)
    yield "`attained`", codes(("true", "false"))
    yield "`reason`", "the release reasons below"
    yield "`code`", "the codes of [Errors](errors.md)"
    yield "`model`, `worker`", "names from the configuration"


def _release_reasons() -> Iterator[tuple[str, str]]:
    docs = attribute_docs(lanes)
    for reason in lanes.ReleaseReason:
        yield f"`{reason.value}`", docs["ReleaseReason", reason.name]
