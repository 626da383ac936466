"""Errors as HTTP: status, type and retry headers of every error."""

from collections.abc import Iterator

import msgspec
import pytest

from inferry.domain.errors import (
    DeadlineExceeded,
    DeadlineInfeasible,
    GatewayError,
    InvalidRequest,
    QueueFull,
    RateLimited,
    ReportTimeout,
    RequestTimeout,
)
from inferry.ingress.errors import error_body, error_headers

CODES = {
    400: {"invalid_request", "context_length_exceeded", "unsupported_feature", "unknown_lane", "kv_quota_too_small"},
    401: {"invalid_api_key"},
    402: {"run_budget_exhausted", "tenant_budget_exhausted"},
    403: {"model_not_allowed", "lane_not_allowed", "admin_only", "storage_disabled"},
    404: {"model_not_found", "run_not_found", "not_found"},
    405: {"method_not_allowed"},
    408: {"queue_timeout", "deadline_infeasible"},
    409: {"run_cancelled", "conflict"},
    413: {"body_too_large", "storage_quota_exceeded"},
    429: {"queue_full", "rate_limited", "tenant_concurrency", "kv_quota_exceeded"},
    499: {"client_closed", "call_aborted"},
    500: {"function_failed", "internal_error"},
    502: {"worker_lost"},
    503: {"no_worker", "draining", "ledger_unavailable", "preempted", "report_timeout"},
    504: {"deadline_exceeded", "request_timeout", "worker_timeout"},
}
TYPES = {
    401: "authentication_error",
    402: "budget_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


def every_error() -> Iterator[type[GatewayError]]:
    todo = [GatewayError]
    while todo:
        kind = todo.pop()
        yield kind
        todo += [one for one in kind.__subclasses__() if one.__module__ == GatewayError.__module__]


def lines(error: GatewayError, call_id: str = "") -> dict[str, str]:
    head = error_headers(error, call_id).decode().removesuffix("\r\n")
    return dict(line.split(": ", 1) for line in head.split("\r\n"))


def test_every_code_has_the_status_it_is_to_have() -> None:
    found: dict[int, set[str]] = {}
    for kind in every_error():
        found.setdefault(kind.status, set()).add(kind.code)
    assert found == CODES


@pytest.mark.parametrize("kind", list(every_error()), ids=lambda kind: kind.__name__)
def test_every_error_has_a_body_that_openai_clients_read(kind: type[GatewayError]) -> None:
    body = msgspec.json.decode(error_body(kind("what happened", param="model")))
    default = "invalid_request_error" if kind.status < 500 else "server_error"
    type_ = TYPES.get(kind.status, default)
    assert body == {"error": {"message": "what happened", "type": type_, "param": "model", "code": kind.code}}


@pytest.mark.parametrize("kind", list(every_error()), ids=lambda kind: kind.__name__)
def test_every_error_says_whether_and_when_to_retry(kind: type[GatewayError]) -> None:
    told = lines(kind("no", retry_after_s=2.5))
    plain = lines(kind("no"))
    assert told["content-type"] == plain["content-type"] == "application/json"
    assert (told["retry-after"], told["retry-after-ms"]) == ("3", "2500")
    if kind.status in (429, 503) and kind.retryable:
        assert told["x-should-retry"] == "true"
        assert told["x-inferry-drop-reason"] == kind.code
        assert ("retry-after" in plain) == ("retry-after-ms" in plain) == (kind is not RateLimited)
    elif kind.status in (402, 403, 408, 409) or kind in (DeadlineExceeded, ReportTimeout, RequestTimeout):
        assert told["x-should-retry"] == plain["x-should-retry"] == "false"
        assert "retry-after" not in plain
        assert ("x-inferry-drop-reason" in plain) == (kind.status not in (403, 504))
    else:
        assert plain.keys() == {"content-type"}


@pytest.mark.parametrize("kind", list(every_error()), ids=lambda kind: kind.__name__)
def test_the_advice_to_retry_never_contradicts_the_documented_contract(kind: type[GatewayError]) -> None:
    advice = lines(kind("no", retry_after_s=2.5)).get("x-should-retry")
    assert advice != ("false" if kind.retryable else "true")


def test_a_report_that_takes_too_long_is_not_repeated_by_clients() -> None:
    told = lines(ReportTimeout("too long"))
    assert told["x-should-retry"] == "false"
    assert "retry-after" not in told


def test_a_full_queue_reports_retry_after_and_the_predicted_wait() -> None:
    error = QueueFull("full", retry_after_s=3.2)
    error.predicted_wait_s = 0.0415
    told = lines(error)
    assert told["retry-after"] == "4"
    assert told["retry-after-ms"] == "3200"
    assert told["x-inferry-predicted-wait-ms"] == "42"


def test_an_infeasible_deadline_names_a_feasible_one() -> None:
    told = lines(DeadlineInfeasible("too late", retry_after_s=7.0))
    assert told["retry-after"] == "7"
    assert told["x-should-retry"] == "false"


def test_a_full_queue_without_a_prediction_still_reports_retry_after() -> None:
    assert lines(QueueFull("full"))["retry-after"] == "1"


def test_a_limit_of_zero_is_not_retryable() -> None:
    told = lines(RateLimited("none at all"))
    assert told["x-should-retry"] == "false"
    assert "retry-after" not in told


def test_a_permanent_error_has_no_retry_after() -> None:
    assert "retry-after" not in lines(InvalidRequest("wrong"))


def test_retry_after_in_seconds_is_at_least_one() -> None:
    told = lines(QueueFull("full", retry_after_s=0.02))
    assert (told["retry-after"], told["retry-after-ms"]) == ("1", "20")


def test_equal_retry_after_values_are_jittered_and_never_too_early() -> None:
    times = [int(lines(QueueFull("full", retry_after_s=8.0), f"job-{n}")["retry-after-ms"]) for n in range(200)]
    assert 8000 <= min(times) < 8200
    assert 9800 < max(times) <= 10_000
    assert len(set(times)) > 100
    assert lines(QueueFull("full", retry_after_s=8.0), "job-1") == lines(QueueFull("full", retry_after_s=8.0), "job-1")


def test_a_retry_slot_is_reported_without_jitter() -> None:
    error = QueueFull("full", retry_after_s=8.0)
    error.has_own_retry_time = True
    assert lines(error, "job-1")["retry-after-ms"] == "8000"
