"""Responses of jobs that failed, restarted or were resumed, and of slow clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.clock import SystemClock
from inferry.domain.errors import ClientClosed, GatewayError, RunBudgetExhausted, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.ingress.openai.render import ContinuationWriter
from inferry.ingress.response import FullResponse, HeartbeatTimer, StreamingResponse
from inferry.ingress.wire_format import OPENAI
from inferry.streams.mailbox import JobStream, MergeCounter
from support.builders import a_job
from support.upstream import chunk

pytestmark = pytest.mark.plain

USED_UP = RunBudgetExhausted("the run has used up its budget")


class Client:
    """The other end: what it was sent, and whether it reads."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_disconnected = False
        self.is_aborted = False
        self.is_over = False
        self.status = 200
        self.body = b""
        self.heartbeat = b""
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.status, self.body, self.is_over = status, body, True

    def begin(self, headers: bytes) -> None: ...

    def write(self, piece: bytes) -> None:
        self.body += piece

    def end(self, piece: bytes) -> None:
        self.body += piece
        self.is_over = True

    def abort(self) -> None:
        self.is_aborted = True

    def reads_again(self) -> None:
        self.is_paused = False
        assert self.on_writable is not None
        self.on_writable()

    def events(self) -> list[dict[str, Any]]:
        lines = [line for line in self.body.split(b"\n\n") if line and line != b"data: [DONE]"]
        return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]


class CancelSender:
    """What an answer asks of the gateway."""

    def __init__(self) -> None:
        self.wall = SystemClock().wall
        self.cancelled: list[tuple[str, GatewayError | None]] = []

    def cancel(self, job_id: str, error: GatewayError | None = None) -> None:
        self.cancelled.append((job_id, error))


class Scene:
    """One job's stream, its answer, and its client."""

    def __init__(self, *, streams: bool, max_unread_bytes: int = 1000, choices: int = 1) -> None:
        job = a_job(stream=streams, run_id="r", step_id="s")
        self.job: InferenceJob = replace(job, payload=replace(job.payload, choices=choices))
        self.stream = JobStream(Attempt(self.job), MergeCounter())
        self.client, self.gateway = Client(), CancelSender()
        gateway: Any = self.gateway
        client: Any = self.client
        if streams:
            beats = HeartbeatTimer(60.0)
            StreamingResponse(self.stream, self.job, gateway, client, OPENAI, beats, max_unread_bytes).start()
        else:
            FullResponse(self.stream, self.job, gateway, client, OPENAI).start()
        self._said = 0

    def says(self, text: str = "", raw: bytes = b"") -> None:
        self.stream.push(Delta(self.job.job_id, "r", "s", self._said, text, (1,), 1, raw))
        self._said += 1

    def begin_attempt(self, *, from_start: bool) -> None:
        resume_point = None if from_start else ResumePoint((1, 2), tuple(range(self._said)))
        self.stream.begin_attempt(
            Attempt(replace(self.job, attempt=2, resume_point=resume_point)), from_start=from_start
        )
        self._said = 0

    def fails(self, error: GatewayError) -> None:
        self.stream.finish(Failed(self.job.job_id, error))

    def ends(self, finish: FinishReason = FinishReason.STOP, **more: Any) -> None:
        self.stream.finish(Done(self.job.job_id, finish, Usage(2, 0, 2), **more))


def played(act: Callable[[], None]) -> None:
    async def main() -> None:
        act()

    asyncio.run(main())


def test_unread_output_is_delivered_before_the_error() -> None:
    def act() -> None:
        scene = Scene(streams=True)
        scene.says(raw=chunk("one"))
        scene.client.is_paused = True
        scene.says(raw=chunk(" two"))
        scene.says(raw=chunk(" three"))
        scene.fails(WorkerLost("gone"))
        scene.client.reads_again()
        *words, error = scene.client.events()
        assert [event["choices"][0]["delta"]["content"] for event in words] == ["one", " two", " three"]
        assert error["error"]["code"] == "worker_lost"
        assert scene.client.is_over
        assert b"[DONE]" not in scene.client.body, "a stream that broke off does not look like one that ended well"

    played(act)


def test_an_error_before_the_first_token_is_a_status_and_not_an_event() -> None:
    def act() -> None:
        scene = Scene(streams=True)
        scene.fails(WorkerLost("gone"))
        assert scene.client.status == 502
        assert msgspec.json.decode(scene.client.body)["error"]["code"] == "worker_lost"

    played(act)


@pytest.mark.parametrize("raw", [True, False])
def test_a_full_response_contains_no_output_of_a_restarted_attempt(raw: bool) -> None:
    def act() -> None:
        scene = Scene(streams=False)
        scene.says("void", chunk("void")) if raw else scene.says("void")
        scene.begin_attempt(from_start=True)
        scene.says("good", chunk("good", "stop")) if raw else scene.says("good")
        scene.ends()
        answer = msgspec.json.decode(scene.client.body)
        assert answer["choices"][0]["message"]["content"] == "good"

    played(act)


def test_unread_output_is_limited_exactly() -> None:
    def act() -> None:
        scene = Scene(streams=True, max_unread_bytes=10)
        scene.says("first")
        scene.client.is_paused = True
        scene.says("x" * 10)
        assert not scene.client.is_aborted
        scene.says("y")
        assert scene.client.is_aborted
        ((job_id, error),) = scene.gateway.cancelled
        assert job_id == scene.job.job_id
        assert isinstance(error, ClientClosed)
        assert "y" not in str(error).replace("bytes", "")

    played(act)


@pytest.mark.parametrize("streams", [True, False])
def test_a_resumed_stream_stopped_by_its_budget_gets_its_finish_event(streams: bool) -> None:
    """The engine that went on said so in words of its own, which do not reach the client."""

    def act() -> None:
        scene = Scene(streams=streams)
        scene.says("", chunk("one"))
        scene.begin_attempt(from_start=False)
        scene.says(" two")
        scene.ends(FinishReason.LENGTH, stopped=USED_UP, stopped_by_engine=True)
        if streams:
            *words, last = scene.client.events()
            assert [event["choices"][0]["delta"]["content"] for event in words] == ["one", " two"]
        else:
            last = msgspec.json.decode(scene.client.body)
            assert last["choices"][0]["message"]["content"] == "one two"
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["inferry"]["code"] == "run_budget_exhausted"

    played(act)


def test_a_finish_event_from_the_engine_is_not_repeated() -> None:
    def act() -> None:
        scene = Scene(streams=True)
        scene.says("", chunk("one") + chunk("", "length"))
        scene.ends(FinishReason.LENGTH, stopped=USED_UP, stopped_by_engine=True)
        told = [event for event in scene.client.events() if any(c.get("finish_reason") for c in event["choices"])]
        assert len(told) == 1
        assert scene.client.events()[-1]["inferry"]["code"] == "run_budget_exhausted"

    played(act)


def test_every_stopped_choice_gets_its_own_finish_event() -> None:
    def act() -> None:
        scene = Scene(streams=True, choices=3)
        scene.says("", chunk("one"))
        scene.ends(FinishReason.LENGTH, stopped=USED_UP)
        (last,) = scene.client.events()[1:]
        assert [(choice["index"], choice["finish_reason"]) for choice in last["choices"]] == [
            (0, "length"),
            (1, "length"),
            (2, "length"),
        ]

    played(act)


def test_per_event_usage_is_not_repeated_after_a_resume() -> None:
    counted = chunk("one").replace(b'"choices"', b'"usage":{"prompt_tokens":3,"completion_tokens":1},"choices"')
    writer = ContinuationWriter(counted)
    assert b"usage" not in writer.text(" two")
    done = Done("j", FinishReason.STOP, Usage(3, 0, 2))
    assert b"usage" not in writer.finish(done)
    assert msgspec.json.decode(writer.usage(done)[6:])["usage"]["completion_tokens"] == 2
