"""Traces through the gateway, as an OTLP receiver sees them."""

import json
import re
import socket
from pathlib import Path
from typing import Any

from aiohttp import web
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from support.several_servers import SeveralServers
from support.tenant_gateway import CHAT
from support.trace_receiver import ReceivedSpan, TraceReceiver
from support.upstream import Upstream, begin, chunk

CANARY = "canary-77aa01"
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "tracestate": "vendor=1,other=2"}


def a_gateway(
    directory: Path, receiver: TraceReceiver, *names: str, config: dict[str, Any] | None = None, **tracing: Any
) -> SeveralServers:
    section = {"endpoint": receiver.endpoint, **tracing}
    return SeveralServers(directory, {name: {} for name in names or ("up",)}, {"tracing": section, **(config or {})})


def a_call(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 3, **more}


def has_requests(count: int) -> Any:
    return lambda spans: sum(span.kind == Span.SPAN_KIND_SERVER for span in spans) >= count


def only(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_a_call_is_one_trace_from_the_client_to_the_engine(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver) as gateway:
        headers = {**PARENT, "x-inferry-run-id": "run-1", "x-inferry-step-id": "plan"}
        assert gateway.call("POST", CHAT, a_call(stream=True), headers).status == 200
        spans = receiver.wait_for(has_requests(1))
        upstream = gateway.upstreams["up"]
        sent = upstream.headers[-1]
    assert {span.trace_id for span in spans} == {CLIENT_TRACE}
    request, queue, attempt = only(spans, f"POST {CHAT}"), only(spans, "queue"), only(spans, "chat m")
    prefill, decode = only(spans, "prefill"), only(spans, "decode")
    assert (request.kind, attempt.kind, queue.kind) == (
        Span.SPAN_KIND_SERVER,
        Span.SPAN_KIND_CLIENT,
        Span.SPAN_KIND_INTERNAL,
    )
    assert request.parent_id == CLIENT_SPAN
    assert {queue.parent_id, attempt.parent_id} == {request.span_id}
    assert {prefill.parent_id, decode.parent_id} == {attempt.span_id}
    assert len({span.span_id for span in spans}) == len(spans) == 5
    # The engine's spans become children of the attempt.
    assert sent["traceparent"] == f"00-{CLIENT_TRACE}-{attempt.span_id}-01"
    assert sent["tracestate"] == request.state == PARENT["tracestate"]
    assert queue.started_ns <= queue.ended_ns <= attempt.started_ns + 1000
    assert attempt.started_ns == prefill.started_ns <= prefill.ended_ns == decode.started_ns <= decode.ended_ns
    assert {span.status for span in spans} == {Status.STATUS_CODE_UNSET}
    said = attempt.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.provider.name"] == "inferry"
    assert said["gen_ai.request.model"] == "m"
    assert said["gen_ai.request.max_tokens"] == 3
    assert said["gen_ai.conversation.id"] == said["inferry.run_id"] == "run-1"
    assert said["gen_ai.usage.output_tokens"] > 0
    assert said["gen_ai.usage.input_tokens"] > 0
    assert said["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
    assert (said["inferry.step_id"], said["inferry.worker"], said["inferry.lane"]) == ("plan", "up", "P1")
    assert said["inferry.decision.picked_by"] == "least_loaded"
    assert json.loads(said["inferry.decision"])["candidates"] == 1
    assert request.attributes["http.response.status_code"] == 200


def test_the_call_of_a_stored_job_belongs_to_the_trace_that_created_it(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver) as gateway:
        assert gateway.call("POST", "/v1/jobs", {"endpoint": CHAT, "body": a_call()}, PARENT).status == 202
        spans = receiver.wait_for(lambda spans: any(span.name == "chat m" for span in spans))
        sent = gateway.upstreams["up"].headers[-1]
    attempt = only(spans, "chat m")
    assert attempt.trace_id == CLIENT_TRACE
    assert (sent["traceparent"], sent["tracestate"]) == (
        f"00-{CLIENT_TRACE}-{attempt.span_id}-01",
        PARENT["tracestate"],
    )


def test_a_trace_begins_here_where_the_client_has_none_or_an_invalid_one(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver) as gateway:
        for header in (None, "00-zz-1-01", f"00-{'0' * 32}-{CLIENT_SPAN}-01", f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01"):
            headers = {} if header is None else {"traceparent": header, "tracestate": "a=b"}
            assert gateway.call("POST", CHAT, a_call(), headers).status == 200
        spans = receiver.wait_for(has_requests(4))
        sent = gateway.upstreams["up"].headers[-4:]
    requests = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert len({span.trace_id for span in requests} - {CLIENT_TRACE}) == 4
    assert {span.parent_id for span in requests} == {""}
    assert all("tracestate" not in headers for headers in sent)


def test_the_clients_decision_not_to_sample_holds_and_is_passed_on(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver, sample_ratio=0.0) as gateway:
        unsampled = {"traceparent": PARENT["traceparent"][:-2] + "00"}
        assert gateway.call("POST", CHAT, a_call(), unsampled).status == 200
        assert gateway.call("POST", CHAT, a_call(), {}).status == 200
        assert gateway.call("POST", CHAT, a_call(), PARENT).status == 200
        spans = receiver.wait_for(has_requests(1))
        sent = [headers["traceparent"] for headers in gateway.upstreams["up"].headers[-3:]]
    assert {span.trace_id for span in spans} == {CLIENT_TRACE}
    assert len([span for span in spans if span.kind == Span.SPAN_KIND_SERVER]) == 1
    assert re.fullmatch(rf"00-{CLIENT_TRACE}-[0-9a-f]{{16}}-00", sent[0])
    assert sent[1].endswith("-00")
    assert sent[2].endswith("-01")


async def loses_its_connection(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


async def overloaded(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=503)


def test_a_failover_has_a_span_for_each_attempt(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver, "first", "second") as gateway:
        gateway.upstreams["first"].script = loses_its_connection
        assert gateway.call("POST", CHAT, a_call(), PARENT).status == 200
        spans = receiver.wait_for(has_requests(1))
        sent = [up.headers[-1]["traceparent"] for up in gateway.upstreams.values()]
    lost, done = sorted((span for span in spans if span.name == "chat m"), key=lambda span: span.started_ns)
    assert [one.split("-")[2] for one in sent] == [lost.span_id, done.span_id]
    assert (lost.attributes["inferry.worker"], done.attributes["inferry.worker"]) == ("first", "second")
    assert (lost.attributes["inferry.attempt"], done.attributes["inferry.attempt"]) == (1, 2)
    assert (lost.status, lost.attributes["error.type"]) == (Status.STATUS_CODE_ERROR, "worker_lost")
    assert (done.status, "error.type" in done.attributes) == (Status.STATUS_CODE_UNSET, False)
    assert only(spans, f"POST {CHAT}").status == Status.STATUS_CODE_UNSET
    queues = sorted((span for span in spans if span.name == "queue"), key=lambda span: span.started_ns)
    assert queues[1].started_ns >= lost.ended_ns


def test_refused_and_failed_calls_say_so(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver) as gateway:
        assert gateway.call("POST", CHAT, a_call(model="unknown"), {}).status == 404
        assert gateway.call("POST", CHAT, a_call(temperature=CANARY), {}).status == 400
        gateway.upstreams["up"].script = loses_its_connection
        failed = gateway.call("POST", CHAT, a_call(), {})
        spans = receiver.wait_for(has_requests(3))
    requests = {span.attributes["error.type"]: span for span in spans if span.kind == Span.SPAN_KIND_SERVER}
    assert requests["model_not_found"].status == Status.STATUS_CODE_UNSET
    assert requests["model_not_found"].attributes["http.response.status_code"] == 404
    assert requests["invalid_request"].status == Status.STATUS_CODE_UNSET
    assert failed.status >= 500
    last = requests[failed.code]
    assert (last.status, last.error) == (Status.STATUS_CODE_ERROR, failed.code)
    assert last.attributes["http.response.status_code"] == failed.status


def test_a_cancelled_call_is_no_error_and_says_that_it_was_cancelled(tmp_path: Path) -> None:
    async def one_token(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a"))
        await up.release.wait()
        return response

    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver) as gateway:
        gateway.upstreams["up"].script = one_token
        body = json.dumps(a_call(stream=True, max_tokens=100)).encode()
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        spans = receiver.wait_for(has_requests(1))
    attempt, request = only(spans, "chat m"), only(spans, f"POST {CHAT}")
    assert (attempt.attributes["inferry.outcome"], attempt.attributes["error.type"]) == ("cancelled", "client_closed")
    assert {attempt.status, request.status} == {Status.STATUS_CODE_UNSET}
    assert request.attributes["error.type"] == "client_closed"


def test_several_prompts_of_a_call_are_one_request(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver) as gateway:
        body = {"model": "m", "prompt": [CANARY, "b"], "max_tokens": 2}
        assert gateway.call("POST", "/v1/completions", body, PARENT).status == 200
        spans = receiver.wait_for(has_requests(1))
    attempts = [span for span in spans if span.name == "text_completion m"]
    assert len(attempts) == 2
    assert {span.parent_id for span in attempts} == {only(spans, "POST /v1/completions").span_id}
    assert len({span.span_id for span in spans}) == len(spans)


def test_a_replayed_call_has_a_request_and_no_attempt(tmp_path: Path) -> None:
    replay = {"single_flight": {"replay_ttl_s": 600}}
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver, config=replay) as gateway:
        for _ in range(2):
            assert (
                gateway.call("POST", CHAT, a_call(), {"idempotency-key": "k-1", "x-inferry-replay": "allow"}).status
                == 200
            )
        spans = receiver.wait_for(has_requests(2))
    (shared,) = [span for span in spans if "inferry.shared_with" in span.attributes]
    assert [span.name for span in spans if span.trace_id == shared.trace_id] == [f"POST {CHAT}"]


def test_a_prompt_is_in_no_span_and_headers_come_from_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRACE_TOKEN", "Bearer t0ken")
    with (
        TraceReceiver() as receiver,
        a_gateway(tmp_path, receiver, headers={"authorization": "$TRACE_TOKEN"}, service_name="gw") as gateway,
    ):
        assert gateway.call("POST", CHAT, a_call(stop=[CANARY]), {}).status == 200
        assert gateway.call("POST", CHAT, a_call(response_format=CANARY), {}).status >= 400
        gateway.upstreams["up"].script = overloaded
        gateway.call("POST", CHAT, a_call(), {})
        receiver.wait_for(has_requests(3))
    assert not any(CANARY.encode() in body for body in receiver.bodies)
    assert receiver.headers[0]["authorization"] == "Bearer t0ken"
    assert receiver.resources[0]["service.name"] == "gw"


def test_a_collector_that_fails_delays_no_call_and_is_counted(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, a_gateway(tmp_path, receiver, timeout_s=0.5) as gateway:
        receiver.answer_status = 400
        assert gateway.call("POST", CHAT, a_call(), {}).status == 200
        receiver.wait_for_request()
        while not gateway.metric("inferry_trace_spans_failed_total"):
            assert gateway.call("POST", CHAT, a_call(), {}).status == 200
        assert gateway.metric("inferry_trace_spans_exported_total") == 0
