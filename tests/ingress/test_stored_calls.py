"""Stored calls: made as the tenant and key that they belong to, under a job id of their own."""

import asyncio

from inferry.admission.caller_directory import Directory
from inferry.domain.callers import Caller
from inferry.domain.errors import QueueFull
from inferry.domain.tenants import ApiKey, Tenant
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.ingress.errors import error_body, error_headers
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.job_ids import job_id_of
from inferry.ingress.stored_calls import StoredCalls

ACME = Tenant(name="acme")
KEY = ApiKey(key_id="k1", tenant="acme", secret_hash=bytes(32), revoked_at=100.0)


class Callers:
    def __init__(self, wall: float) -> None:
        self._directory = Directory([ACME], [KEY], is_auth_required=True)
        self._wall = wall

    def stored_caller(self, tenant: str, key_id: str | None) -> Caller:
        return self._directory.stored_caller(tenant, key_id, self._wall)


def make(serve: object, key_id: str | None = "k1", wall: float = 50.0) -> CallAnswer:
    calls = StoredCalls(serve, ["/v1/chat/completions"], Callers(wall))  # type: ignore[arg-type]
    call = StoredCall(
        tenant="acme", key_id=key_id, path="/v1/chat/completions", body=b"{}", job_id="j-0", run_id="r", step_id="s"
    )
    assert calls.paths() == {"/v1/chat/completions"}
    return asyncio.run(calls.call(call))


def test_a_stored_call_has_the_caller_the_lane_the_run_and_the_job_id_it_was_stored_with() -> None:
    seen: list[Request] = []

    def serve(request: Request, reply: Reply) -> None:
        seen.append(request)
        reply.respond(200, b"content-type: application/json\r\nx-request-id: abc\r\n", b"{}")

    assert make(serve) == CallAnswer(status=200, body=b"{}", request_id="abc")
    request = seen[0]
    assert request.caller is not None
    assert (request.caller.tenant, request.caller.key) == (ACME, KEY)
    assert job_id_of(request.headers) == "j-0"
    named = {name: value for name, value in request.headers.items() if name.startswith(b"x-inferry")}
    assert named == {b"x-inferry-lane": b"P2", b"x-inferry-run-id": b"r", b"x-inferry-step-id": b"s"}


def test_a_refusal_says_why_and_when_to_retry() -> None:
    error = QueueFull("full", retry_after_s=2.5)

    def serve(request: Request, reply: Reply) -> None:
        reply.respond(429, error_headers(error), error_body(error))

    answer = make(serve)
    assert (answer.status, answer.code, answer.retry_after_s) == (429, "queue_full", 2.5)


def test_a_call_whose_key_was_revoked_is_not_made() -> None:
    def serve(request: Request, reply: Reply) -> None:
        raise AssertionError("called")

    answer = make(serve, wall=100.0)
    assert (answer.status, answer.code, answer.retry_after_s) == (401, "invalid_api_key", None)


def test_a_call_without_a_key_belongs_to_its_tenant() -> None:
    tenants: list[object] = []

    def serve(request: Request, reply: Reply) -> None:
        assert request.caller is not None
        tenants.append(request.caller.tenant.name)
        reply.respond(200, b"", b"")

    make(serve, key_id=None)
    assert tenants == ["acme"]
