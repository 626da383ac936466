"""HTTP requests are counted by endpoint and class of status; labels do not grow with paths."""

import pytest

from inferry.observe.metrics import Metrics
from inferry.observe.request_counts import CLIENT_CLOSED


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics([], [])
    metrics.serve_endpoints(["/v1/chat/completions", "/v1/messages", "/v1/messages/batches", "/v1/runs", "/"])
    return metrics


def counts(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (dict(one.labels)["endpoint"], dict(one.labels)["status"]): one.value
        for one in metrics.readings()
        if one.name == "inferry_http_requests_total" and one.value
    }


@pytest.mark.parametrize(
    ("target", "endpoint"),
    [
        (b"/v1/chat/completions", "/v1/chat/completions"),
        (b"/v1/chat/completions?x=1", "/v1/chat/completions"),
        (b"/v1/messages/count_tokens", "/v1/messages"),
        (b"/v1/messages/batches/b1/results", "/v1/messages/batches"),
        (b"/v1/runs/a%2Fb?wait=1", "/v1/runs"),
        (b"/", "/"),
        (b"/wp-admin.php", "other"),
        (b"*", "other"),
        (b"", "other"),
    ],
)
def test_a_request_counts_for_the_endpoint_it_is_below(metrics: Metrics, target: bytes, endpoint: str) -> None:
    metrics.requests.count(target, 200)
    assert counts(metrics) == {(endpoint, "2xx"): 1}


@pytest.mark.parametrize(
    ("status", "label"), [(200, "2xx"), (201, "2xx"), (429, "4xx"), (CLIENT_CLOSED, "4xx"), (503, "5xx"), (529, "5xx")]
)
def test_statuses_are_counted_by_class(metrics: Metrics, status: int, label: str) -> None:
    metrics.requests.count(b"/v1/runs", status)
    assert counts(metrics) == {("/v1/runs", label): 1}


def test_paths_that_clients_invent_add_no_series(metrics: Metrics) -> None:
    before = len(metrics.readings())
    for number in range(1000):
        metrics.requests.count(b"/v1/invented/%d" % number, 404)
    assert len(metrics.readings()) == before
    assert counts(metrics) == {("other", "4xx"): 1000}
