"""Shared executions in edge cases: zeros, capped responses, readers of a resumed job."""

import asyncio

from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.singleflight.request_key import digest
from inferry.dispatch.singleflight.response_cache import ResponseCache
from inferry.dispatch.singleflight.single_flight import SingleFlight
from inferry.dispatch.values import CachedResponse, Sharing
from inferry.domain.attempts import Attempt
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.clock import SystemClock
from inferry.domain.errors import DeadlineExceeded, GatewayError, QueueTimeout, RunBudgetExhausted, RunCancelled
from inferry.domain.jobs import InferenceJob, RepeatPolicy, ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import BatchPlan
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.streams.demux import Demux
from inferry.streams.fan_out import Reader
from inferry.streams.mailbox import JobStream
from support.builders import a_job
from support.loop_helpers import run, run_pending

FREE = Sampling(temperature=1.0, max_tokens=10)
SEED_0 = Sampling(temperature=1.0, seed=0, max_tokens=10)


class Stage:
    """The least that sharing needs of a gateway: streams that the test fills itself."""

    def __init__(self, **single_flight: float) -> None:
        self.clock = SystemClock()
        self.demux = Demux()
        self.flights = SingleFlight(
            Sharing(**single_flight),  # type: ignore[arg-type]
            self,
            self.clock,
            Deadlines(None, self.clock.now),
        )
        self.cancelled: list[tuple[str, GatewayError | None]] = []

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        return self.demux.open(Attempt(job))

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> None:
        self.cancelled.append((job_id, error))

    def admit_follower(self, job: InferenceJob, caller: Caller) -> "Stage":
        return self

    def ended(self, attempt: Attempt) -> None: ...

    def withdraw(self) -> None: ...

    def follower_ended(self, job: InferenceJob, entry: LedgerEntry) -> None: ...

    def shared(self, kind: str) -> None: ...

    def unshared(self) -> None: ...

    def job(self, sampling: Sampling = FREE, repeat: RepeatPolicy | None = None, **fields: object) -> InferenceJob:
        return replace(a_job(sampling=sampling, at=self.clock.now(), **fields), repeat=repeat)  # type: ignore[arg-type]

    def submit(self, job: InferenceJob) -> Reader:
        return self.flights.submit(job, ANONYMOUS)

    def runs(self, job: InferenceJob, text: str) -> None:
        """The job is sent, and says one word."""
        stream = self.stream(job)
        plan = BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
        stream.attempt.sent(plan, self.clock.now())
        stream.attempt.first_token(self.clock.now())
        stream.push(Delta(job.job_id, job.run_id, job.step_id, 0, text, (0,), 1))

    def goes_on(self, job: InferenceJob) -> None:
        """Its attempt is lost, and another is to go on after the first word."""
        again = replace(job, attempt=2, resume_point=ResumePoint((1, 2), (0,)))
        self.stream(job).begin_attempt(Attempt(again), from_start=False)

    def stream(self, job: InferenceJob) -> JobStream:
        stream = self.demux.get(job.job_id)
        assert stream is not None
        return stream

    def ends(self, job: InferenceJob, stopped: GatewayError | None = None) -> None:
        done = Done(job.job_id, FinishReason.STOP, Usage(3, 0, 1), stopped=stopped)
        self.demux.close(self.stream(job), done)


def text_of(reader: Reader) -> str:
    delta, end = reader.take_nowait()
    assert isinstance(end, Done)
    return "" if delta is None else delta.text


def test_a_seed_of_zero_is_a_seed() -> None:
    async def scenario() -> None:
        stage = Stage()
        first, second, unseeded = stage.job(SEED_0), stage.job(SEED_0), stage.job(FREE)
        assert stage.flights.may_share(first)
        assert not stage.flights.may_share(unseeded)
        stage.submit(first)
        assert stage.submit(second).shared_with == first.job_id
        stage.flights.close()

    run(scenario())


def test_fields_are_delimited_in_the_request_key() -> None:
    one, other = a_job(body=b'{"a":1,"b":2}'), a_job(body=b'{"a1b":2}')
    assert digest(one) != digest(other)
    assert digest(one) == digest(a_job(body=b'{"b":2, "a":1}'))


def test_a_linger_of_zero_overrides_the_default() -> None:
    async def scenario() -> None:
        stage = Stage(linger_s=60.0)
        job = stage.job(repeat=RepeatPolicy("run step", linger_s=0.0))
        stage.submit(job)
        stage.flights.cancel(job.job_id, None)
        assert stage.cancelled == [(job.job_id, None)]
        lingering = stage.job(repeat=RepeatPolicy("run other"))
        stage.submit(lingering)
        stage.flights.cancel(lingering.job_id, None)
        assert len(stage.cancelled) == 1, "the default lingers"
        stage.flights.close()

    run(scenario())


def test_a_call_that_is_cancelled_for_a_reason_does_not_linger() -> None:
    async def scenario() -> None:
        stage = Stage(linger_s=60.0)
        job = stage.job(repeat=RepeatPolicy("run step"))
        stage.submit(job)
        stage.runs(job, "one")
        stage.flights.cancel(job.job_id, RunCancelled("it was"))
        assert [job_id for job_id, _ in stage.cancelled] == [job.job_id]
        stage.flights.close()

    run(scenario())


def test_an_answer_that_a_budget_stopped_is_not_kept_for_the_same_call_made_again() -> None:
    async def scenario() -> None:
        stage = Stage()
        for stopped, kept in ((None, True), (RunBudgetExhausted("used up"), False)):
            repeat = RepeatPolicy(f"run {kept}", keep=True)
            first, again = stage.job(repeat=repeat), stage.job(repeat=repeat)
            stage.submit(first)
            stage.runs(first, "one")
            stage.ends(first, stopped)
            assert stage.submit(again).is_replay is kept
        stage.flights.close()

    run(scenario())


def test_the_replay_of_a_resumed_response_keeps_its_resume_point() -> None:
    async def scenario() -> None:
        stage = Stage()
        repeat = RepeatPolicy("run step", keep=True)
        first = stage.job(repeat=repeat)
        stage.submit(first)
        stage.runs(first, "one")
        stage.goes_on(first)
        stage.stream(first).push(Delta(first.job_id, first.run_id, first.step_id, 0, " two", (1,), 1))
        stage.ends(first)
        replayed = stage.submit(stage.job(repeat=repeat))
        assert replayed.is_replay
        assert replayed.attempt.job.resume_point is not None, "how it is written hangs on that"
        assert text_of(replayed) == "one two"
        stage.flights.close()

    run(scenario())


def test_the_deadline_of_a_reading_follower_is_no_queue_timeout() -> None:
    async def scenario() -> None:
        stage = Stage()
        leader, other = stage.job(SEED_0, body=b'{"a":1}'), stage.job(SEED_0, body=b'{"b":2}')
        ends: list[object] = []
        for job, has_begun in ((leader, True), (other, False)):
            stage.submit(job)
            follower = stage.job(SEED_0, body=job.payload.body, deadline=stage.clock.now())
            reader = stage.submit(follower)
            assert reader.shared_with == job.job_id
            if has_begun:
                stage.runs(job, "one")
                stage.goes_on(job)
            async with asyncio.timeout(20):
                while not has_begun and not reader.is_ended:
                    await asyncio.sleep(0)
            await run_pending()
            ends.append(reader.take_nowait()[1])
        assert isinstance(ends[0], Failed)
        assert isinstance(ends[0].error, DeadlineExceeded)
        assert isinstance(ends[1], Failed)
        assert isinstance(ends[1].error, QueueTimeout)
        stage.flights.close()

    run(scenario())


def test_a_response_is_cached_up_to_exactly_the_byte_limit() -> None:
    def an_answer(size: int) -> CachedResponse:
        delta = Delta("j", "run", "step", 0, "x" * size, (), 1)
        done = Done("j", FinishReason.STOP, Usage())
        return CachedResponse("j", b"digest", delta, done, was_resumed=False, until=10.0)

    replays = ResponseCache(an_answer(10).size)
    replays.keep(("a", "call"), an_answer(10))
    assert replays.find(("a", "call"), 0.0) is not None
    replays.keep(("a", "call"), an_answer(11))
    assert (replays.find(("a", "call"), 0.0), replays.used) == (None, 0)
