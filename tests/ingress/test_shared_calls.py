"""Identical calls over real sockets: what each client sees of a shared response."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, FinishReason, Usage
from support.scripted_gateway import ScriptedGateway
from support.scripted_worker import ScriptedWorker
from support.serving import Serving, get, post
from support.upstream import chunk, role, usage

CHAT = "/v1/chat/completions"
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
FREE = CALL | {"temperature": 1}
STEP = {"x-inferry-run-id": "r", "x-inferry-step-id": "s"}

Answer = tuple[int, dict[str, str], Any]


class EventfulWorker(ScriptedWorker):
    """Speaks in an engine's own events."""

    async def _generate(self, job: InferenceJob, emit: Emit) -> None:
        if job.step_id == "probe":
            await super()._generate(job, emit)
            return
        pieces = [role(), *(chunk(word) for word in self.words), chunk("", "stop")]
        for index, raw in enumerate(pieces):
            await self.gate.wait()
            tokens = int(0 < index < len(pieces) - 1)
            emit(Delta(job.job_id, job.run_id, job.step_id, index, tokens=tokens, raw=raw))
            await asyncio.sleep(0)
        words = len(self.words)
        emit(Done(job.job_id, FinishReason.STOP, Usage(9, 0, words), usage(9, words)))
        self._running.pop(job.job_id, None)


@contextmanager
def gateway_that_waits(directory: Path, worker: type[ScriptedWorker] = ScriptedWorker) -> Iterator["Waiting"]:
    with Waiting(directory, worker) as gateway, ThreadPoolExecutor(4) as gateway.clients:
        try:
            yield gateway
        finally:
            gateway.goes_on()


class Waiting(Serving):
    """A gateway whose worker waits until it is released."""

    clients: ThreadPoolExecutor
    worker: ScriptedWorker

    def __init__(self, directory: Path, kind: type[ScriptedWorker]) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
            self.worker = kind()
            return [self.worker], {}

        super().__init__(directory, make)

    def holds_back(self) -> None:
        async def hold() -> None:
            self.worker.gate.clear()

        self.run(hold())

    def goes_on(self) -> None:
        async def go() -> None:
            self.worker.gate.set()

        self.run(go())

    def call(self, body: Any, **headers: str) -> "Future[Answer]":
        """Ask in the background, and return once the gateway has the call."""
        before = self.in_flight()
        asked = self.clients.submit(
            post, self.url, CHAT, body, {name.replace("_", "-"): headers[name] for name in headers}
        )
        until = time.monotonic() + 120
        while self.in_flight() == before:
            assert time.monotonic() < until
            time.sleep(0.005)
        return asked

    def in_flight(self) -> int:
        return int(self.metric("inferry_jobs_in_flight"))

    def metric(self, name: str) -> float:
        (line,) = [line for line in get(self.url, "/metrics")[2].splitlines() if line.startswith(name + " ")]
        return float(line.rpartition(" ")[2])

    @property
    def executions(self) -> int:
        return sum(len(plan.jobs) for plan in self.worker.plans)


def said(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.split("\n\n") if line.startswith("data: {")]
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in msgspec.json.decode(event)["choices"]
    )


@pytest.mark.parametrize("kind", [ScriptedWorker, EventfulWorker])
def test_two_clients_share_an_answer_and_each_gets_it_as_it_asked(tmp_path: Path, kind: type[ScriptedWorker]) -> None:
    with gateway_that_waits(tmp_path, kind) as gateway:
        gateway.holds_back()
        options = {"stream_options": {"include_usage": True}}
        asked = [
            gateway.call(CALL, x_request_id="first"),
            gateway.call(CALL | {"stream": True}, x_request_id="second"),
            gateway.call(CALL | {"stream": True} | options, x_request_id="third"),
        ]
        gateway.goes_on()
        answers = [one.result(120) for one in asked]
        assert [status for status, _, _ in answers] == [200, 200, 200]
        assert [said(body) for _, _, body in answers] == ["one two three"] * 3
        assert gateway.executions == 1
        first, second, third = (headers for _, headers, _ in answers)
        assert "x-inferry-shared-with" not in first
        assert second["x-inferry-shared-with"] == third["x-inferry-shared-with"]
        assert [headers["x-request-id"] for headers in (first, second, third)] == ["first", "second", "third"]
        assert second["x-inferry-worker"] == "scripted"
        assert float(second["x-inferry-queue-ms"]) >= 0
        assert answers[0][2]["usage"]["completion_tokens"] == 3
        assert ['"completion_tokens":3' in body for _, _, body in answers[1:]] == [False, True]
        assert all(body.endswith("data: [DONE]\n\n") for _, _, body in answers[1:])


def test_a_client_that_disconnects_does_not_affect_the_other_subscribers(tmp_path: Path) -> None:
    with gateway_that_waits(tmp_path) as gateway:
        gateway.holds_back()
        body = msgspec.json.encode(CALL | {"stream": True})
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as leaves:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            leaves.sendall(head.encode() + body)
            while not gateway.in_flight():
                time.sleep(0.005)
            stays = gateway.call(CALL)
        while len(gateway.service.gateway._single_flight._subscribers) > 1:
            time.sleep(0.005)
        gateway.goes_on()
        status, headers, answer = stays.result(120)
        assert (status, said(answer)) == (200, "one two three")
        assert "x-inferry-shared-with" in headers
        assert (gateway.executions, gateway.worker.cancelled) == (1, [])


def left_in_the_middle(gateway: Waiting, *, headers: dict[str, str]) -> None:
    """A client that loses its connection once the gateway has its call."""
    body = msgspec.json.encode(FREE | {"stream": True})
    lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        while not gateway.executions:
            time.sleep(0.005)
    while gateway.service.gateway._single_flight._subscribers:
        time.sleep(0.005)


def test_a_client_that_retries_in_time_gets_its_answer(tmp_path: Path) -> None:
    with gateway_that_waits(tmp_path) as gateway:
        gateway.holds_back()
        left_in_the_middle(gateway, headers=STEP | {"x-inferry-linger-ms": "30000"})
        retry = gateway.call(FREE, **STEP)
        gateway.goes_on()
        status, headers, answer = retry.result(120)
        assert (status, said(answer), gateway.executions) == (200, "one two three", 1)
        assert "x-inferry-shared-with" in headers


def test_a_call_does_not_linger_by_default(tmp_path: Path) -> None:
    with gateway_that_waits(tmp_path) as gateway:
        gateway.holds_back()
        left_in_the_middle(gateway, headers=STEP)
        until = time.monotonic() + 120
        while not gateway.worker.cancelled:
            assert time.monotonic() < until
            time.sleep(0.005)
        assert gateway.in_flight() == 0


@pytest.mark.parametrize("headers", [STEP, {"idempotency-key": "k"}, {"x-inferry-run-id": "r", "idempotency-key": "k"}])
def test_a_retry_joins_the_call_in_flight_at_any_temperature(tmp_path: Path, headers: dict[str, str]) -> None:
    with gateway_that_waits(tmp_path) as gateway:
        gateway.holds_back()
        asked = [gateway.call(FREE, **headers), gateway.call(FREE, **headers), gateway.call(FREE)]
        gateway.goes_on()
        _, retry, _ = asked[1].result(120)
        _, other, _ = asked[2].result(120)
        assert "x-inferry-shared-with" in retry
        assert "x-inferry-shared-with" not in other
        assert gateway.executions == 2


def test_a_step_without_a_run_is_not_joined(tmp_path: Path) -> None:
    with gateway_that_waits(tmp_path) as gateway:
        gateway.holds_back()
        step = {"x-inferry-step-id": "s", "x-inferry-replay": "allow"}
        asked = [gateway.call(FREE, **step), gateway.call(FREE, **step)]
        gateway.goes_on()
        assert all("x-inferry-shared-with" not in one.result(120)[1] for one in asked)
        assert gateway.executions == 2


@pytest.mark.parametrize("kind", [ScriptedWorker, EventfulWorker])
def test_a_cached_response_is_replayed_full_or_streamed(tmp_path: Path, kind: type[ScriptedWorker]) -> None:
    with gateway_that_waits(tmp_path, kind) as gateway:
        _, headers, first = post(gateway.url, CHAT, FREE, STEP | {"x-inferry-replay": "allow"})
        assert "x-inferry-replayed" not in headers
        for body in (FREE, FREE | {"stream": True}):
            status, headers, again = post(gateway.url, CHAT, body, STEP)
            assert (status, said(again), headers["x-inferry-replayed"]) == (200, said(first), "true")
            assert "x-inferry-worker" not in headers
        assert gateway.executions == 1
        for other in ({"x-inferry-replay": "never"}, {"x-inferry-step-id": "t"}, {"x-inferry-tenant": "b"}):
            _, headers, _ = post(gateway.url, CHAT, FREE, STEP | other)
            assert "x-inferry-replayed" not in headers
        assert gateway.executions == 4


@pytest.mark.parametrize(
    "headers", [{"x-inferry-replay": "maybe"}, {"x-inferry-linger-ms": "-1"}, {"idempotency-key": "a key"}]
)
def test_unknown_header_values_are_refused(scripted: ScriptedGateway, headers: dict[str, str]) -> None:
    status, _, body = post(scripted.url, CHAT, FREE, headers)
    assert (status, body["error"]["param"]) == (400, next(iter(headers)))
