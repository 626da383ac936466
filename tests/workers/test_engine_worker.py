"""An engine process as a worker, with the process played by the test: resumed jobs and late ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import Struct

from inferry.domain.errors import ClientClosed, ContextLengthExceeded, InvalidRequest, NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Item, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Phase
from inferry.engine.messages import Abort, Account, Add, Ready, Rejected, Shutdown, Stats, StepDone, ToEngine, frame
from inferry.engine.messages import End as EngineEnd
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram
from inferry.workers.in_process.engine_worker import EngineLimits, EngineWorker
from support.builders import a_job
from support.loop_helpers import run, run_pending

EOS = 0
READY = Ready(100, 1000, 16, 50, [EOS], 1)
STATS = Stats(1, 1, 0, 16, 10)
PIECES = {1: b"one", 2: b" two", 3: b" stop", 4: "é".encode()[:1], 5: "é".encode()[1:]}


class Bytes:
    """A byte-level vocabulary of a few pieces."""

    longest_token_bytes = 5
    fingerprint = "words"

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        raise NotImplementedError

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        continues_last: bool = False,
        tools: Sequence[dict[str, object]] = (),
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(PIECES.get(token, b"") for token in token_ids).decode(errors="replace")


class Link:
    """The gateway's end of a socket to an engine that is the test itself."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.exit_message: str | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def kill(self) -> None: ...


class Scene:
    """A worker whose engine is up, and what was told of its jobs."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.items: list[Item] = []
        self.is_ready = True
        self.worker = EngineWorker(
            "w",
            open_link=lambda receive: EngineLink.open(EngineProgram(("true",), {}, Shutdown()), receive),
            limits=EngineLimits(sequences=4, kv_tokens=1000, prefill_tokens=100, chunk_tokens=100),
            models=["m"],
            make_assembler=lambda stop: Assembler(Bytes(), stop),
            restart_backoff_s=0.001,
            restart_backoff_max_s=0.004,
        )

    @property
    def link(self) -> Link:
        return self.links[-1]

    @asynccontextmanager
    async def open(self, program: EngineProgram, on_message: Callable[[bytes], None]) -> AsyncIterator[Link]:
        self.links.append(Link())
        if self.is_ready:
            asyncio.get_running_loop().call_soon(on_message, frame(READY)[4:])
        yield self.links[-1]

    def says(self, message: Struct) -> None:
        self.worker._engine._receive(frame(message)[4:])

    def writes(self, *tokens: int) -> None:
        for token in tokens:
            self.says(StepDone([(self.request().key, token)], [], STATS))

    def request(self) -> Any:
        adds = [message for message in self.link.sent if isinstance(message, Add)]
        return adds[-1].requests[-1]

    async def runs(self, job: InferenceJob) -> "asyncio.Task[None]":
        plan = BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
        task = asyncio.create_task(self.worker.run(plan, self.items.append))
        await run_pending()
        return task

    async def is_lost(self) -> None:
        """The engine's process is gone."""
        seen = len(self.links)
        self.link.finished.set_result(None)
        async with asyncio.timeout(20):
            while len(self.links) == seen:
                await asyncio.sleep(0.01)
        await run_pending()

    @property
    def end(self) -> Done | Failed:
        end = self.items[-1]
        assert isinstance(end, Done | Failed)
        return end

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Delta))


@pytest.fixture
def scene_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    @asynccontextmanager
    async def made() -> AsyncIterator[Scene]:
        scene = Scene()
        monkeypatch.setattr(EngineLink, "open", scene.open)
        await scene.worker.start()
        assert scene.worker.view().phase is Phase.READY
        try:
            yield scene
        finally:
            await scene.worker.close()

    return made


SceneOf = Callable[[], Any]


def a_stream(earlier: tuple[int, ...] | None = None, **sampling: Any) -> InferenceJob:
    how = Sampling(**{"temperature": 0.0, "max_tokens": 10, **sampling})
    job = a_job(prompt_ids=(9, 9, 9), sampling=how, stream=True, resume=ResumeMode.CONTINUE)
    if earlier is None:
        return job
    return replace(job, attempt=2, resume_point=ResumePoint((9, 9, 9), earlier))


@pytest.mark.parametrize(
    ("earlier", "written", "used"),
    [
        (None, (), Usage(0, 0, 0)),  # nothing is known to have been computed
        (None, (1,), Usage(3, 0, 1)),
        ((1, 2), (), Usage(0, 0, 0)),
        ((1, 2), (1, 2), Usage(5, 0, 2)),  # what it went on from was computed too
    ],
)
def test_an_attempt_that_is_lost_used_what_it_computed(
    scene_of: SceneOf, earlier: tuple[int, ...] | None, written: tuple[int, ...], used: Usage
) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            await scene.runs(a_stream(earlier))
            scene.writes(*written)
            await scene.is_lost()
            assert isinstance(scene.end, Failed)
            assert isinstance(scene.end.error, WorkerLost)
            assert scene.end.usage == used
            whole = (*(earlier or ()), *written)
            assert scene.end.resume_point == (ResumePoint((9, 9, 9), whole) if whole else None)

    run(scenario())


def test_a_job_that_was_not_tokenized_is_refused_as_one_to_be_sent_again(scene_of: SceneOf) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            await scene.runs(a_job())
            assert isinstance(scene.end, Failed)
            error = scene.end.error
            assert (error.status, error.code, error.retryable, error.can_failover) == (503, "no_worker", True, False)

    run(scenario())


def test_a_job_that_was_cancelled_before_its_engine_was_lost_is_not_lost_but_cancelled(scene_of: SceneOf) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            job = a_stream((1,))
            await scene.runs(job)
            scene.writes(2)
            cancelling = asyncio.create_task(scene.worker.cancel([job.job_id]))
            await run_pending()
            assert isinstance(scene.link.sent[-1], Abort)
            await scene.is_lost()
            assert isinstance(scene.end, Failed)
            assert isinstance(scene.end.error, ClientClosed)
            assert await cancelling == {job.job_id}

    run(scenario())


def test_an_answer_whose_stop_string_has_come_is_done_even_where_its_engine_is_lost(scene_of: SceneOf) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            await scene.runs(a_stream((1,), stop=("stop",)))
            scene.writes(2, 3)
            await scene.is_lost()
            assert scene.text == " two "
            assert isinstance(scene.end, Done)
            assert (scene.end.finish, scene.end.usage) == (FinishReason.STOP, Usage(4, 0, 2))

    run(scenario())


@pytest.mark.parametrize(
    ("earlier", "how", "finish"),
    [
        ((1, 2), {"max_tokens": 2}, FinishReason.LENGTH),
        ((1, 2), {"max_tokens": 3}, None),
        ((1, EOS), {}, FinishReason.STOP),
        ((1, EOS), {"ignore_eos": True}, None),
        ((1, 2), {"stop_token_ids": (2,)}, FinishReason.STOP),
        ((1, 2), {"stop_token_ids": (2,), "ignore_eos": True}, FinishReason.STOP),
    ],
)
def test_a_resumed_job_continues_unless_it_had_written_its_last_token(
    scene_of: SceneOf, earlier: tuple[int, ...], how: dict[str, Any], finish: FinishReason | None
) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_stream(earlier, **how))
            if finish is None:
                left = how.get("max_tokens", 10) - len(earlier)
                assert (scene.request().prompt_ids, scene.request().sampling.max_tokens) == ([9, 9, 9, *earlier], left)
                assert not scene.items
            else:
                assert isinstance(scene.end, Done)
                assert (scene.end.finish, scene.end.usage) == (finish, Usage())
                await task

    run(scenario())


def test_a_resumed_job_that_fills_the_context_has_ended_and_a_prompt_that_does_is_refused(scene_of: SceneOf) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            for earlier in ((1, 2), None):
                await scene.runs(a_stream(earlier))
                scene.says(Rejected(scene.request().key, True, "too long"))
            resumed, plain = scene.items
            assert (resumed.finish, resumed.usage) == (FinishReason.LENGTH, Usage())
            assert isinstance(plain, Failed)
            assert isinstance(plain.error, ContextLengthExceeded)

    run(scenario())


def test_a_job_resumes_after_a_complete_character(scene_of: SceneOf) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            await scene.runs(a_stream((1,)))
            scene.writes(2, 4)
            await scene.is_lost()
            assert scene.text == " two"
            assert scene.end.resume_point == ResumePoint((9, 9, 9), (1, 2)), (
                "the first half of a letter is written again"
            )
            await scene.runs(a_stream((1, 2, 4)))
            scene.writes(5)
            assert scene.items[-1].text == "é", "and one that was handed over is completed"

    run(scenario())


def test_a_resumed_job_that_ends_reports_what_the_engine_used_and_what_was_delivered(scene_of: SceneOf) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_stream((1,)))
            scene.writes(2)
            key = scene.request().key
            scene.says(StepDone([(key, EOS)], [EngineEnd(Account(key, 4, 2, 0.5, 3), True)], STATS))
            await task
            assert isinstance(scene.end, Done)
            assert (scene.end.finish, scene.end.usage) == (FinishReason.STOP, Usage(4, 3, 2, 0.5))

    run(scenario())


@pytest.mark.parametrize(("is_busy", "kind"), [(False, InvalidRequest), (True, NoWorker)])
def test_a_constraint_that_a_busy_engine_did_not_compile_is_not_invalid(
    scene_of: SceneOf, is_busy: bool, kind: type[Exception]
) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_stream())
            end = EngineEnd(Account(scene.request().key, 4, 0, 0.0), False, "not compiled", is_busy)
            scene.says(StepDone([], [end], STATS))
            await task
            assert isinstance(scene.end, Failed)
            assert type(scene.end.error) is kind

    run(scenario())


def test_an_engine_that_was_up_is_started_again_soon_and_one_that_never_is_later_each_time(
    scene_of: SceneOf, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            for is_ready in (False, False, False, True, True):
                scene.is_ready = is_ready
                await scene.is_lost()
            await scene.is_lost()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    waits = [record.args[2] for record in caplog.records if "restarting it in" in record.msg]  # type: ignore[index]
    assert waits == [0.001, 0.002, 0.004, 0.004, 0.001, 0.001]
