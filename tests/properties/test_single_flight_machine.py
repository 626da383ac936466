"""Single flight under any order of arrivals, departures, deltas and losses."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.single_flight_harness import GREEDY
from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.singleflight.single_flight import SingleFlight
from inferry.dispatch.values import Sharing
from inferry.domain.attempts import Attempt
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.clock import SystemClock
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    RunBudgetExhausted,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Usage
from inferry.streams.demux import Demux
from inferry.streams.mailbox import JobStream
from support.builders import a_job

# -- any order -------------------------------------------------------------------------------------------------------


class Stage:
    """The least that sharing needs of a gateway: streams that the test fills itself."""

    def __init__(self) -> None:
        self.demux = Demux()
        self.flights = SingleFlight(Sharing(), self, SystemClock(), Deadlines(None, SystemClock().now))
        self.cancelled: list[str] = []
        self.accounts: list[str] = []
        self.tickets = 0
        self.next = 0

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        self.next = 0
        return self.demux.open(Attempt(job))

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> None:
        self.cancelled.append(job_id)

    def admit_follower(self, job: InferenceJob, caller: Caller) -> "Stage":
        self.tickets += 1
        return self

    def ended(self, attempt: Attempt) -> None:
        self.tickets -= 1

    def withdraw(self) -> None:
        self.tickets -= 1

    def follower_ended(self, job: InferenceJob, entry: LedgerEntry) -> None:
        self.accounts.append(entry.job_id)

    def shared(self, kind: str) -> None: ...

    def unshared(self) -> None: ...


ACTS = st.one_of(
    st.tuples(st.just("arrives"), st.booleans()),
    st.tuples(st.just("leaves"), st.integers(0, 6)),
    st.tuples(st.just("says"), st.just(0)),
    st.tuples(st.just("is lost"), st.booleans()),
    st.tuples(st.just("is cut short"), st.just(0)),
)


class Play:
    """One sequence of acts, and what every reader has heard. `said` is by execution."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.said: dict[str, list[str]] = {}
        self.present: dict[str, Any] = {}
        self.heard: dict[str, tuple[int, str]] = {}
        self.ends: dict[str, End] = {}
        self.torn: set[str] = set()

    def running(self) -> JobStream | None:
        ids = self.stage.demux.job_ids()
        return self.stage.demux.get(ids[0]) if ids else None

    def finish(self, end: Callable[[str], End]) -> None:
        stream = self.running()
        if stream is not None:
            self.stage.demux.close(stream, end(stream.attempt.job.job_id))

    def listen(self, reader: Any) -> None:
        job_id = reader.job.job_id

        def on_news() -> None:
            delta, end = reader.take_nowait()
            restarts, text = self.heard.get(job_id, (0, ""))
            if reader.restarts != restarts:
                assert not reader.job.stream
                restarts, text = reader.restarts, ""
            self.heard[job_id] = restarts, text + ("" if delta is None else delta.text)
            if end is not None:
                assert job_id not in self.ends, "one end each"
                self.ends[job_id] = end

        reader.listen(on_news)

    def arrives(self, streams: bool) -> None:
        job = a_job(sampling=GREEDY, stream=streams)
        reader = self.stage.flights.submit(job, ANONYMOUS)
        self.present[job.job_id] = reader
        self.listen(reader)
        self.said.setdefault(job.job_id, [])
        assert len(self.stage.demux) == 1

    def leaves(self, index: int) -> None:
        job_id = list(self.present)[index]
        self.stage.flights.cancel(job_id, None)
        del self.present[job_id]

    def says(self, stream: JobStream) -> None:
        job, said = stream.attempt.job, self.said[stream.attempt.job.job_id]
        said.append(f"{len(said)} ")
        stream.push(Delta(job.job_id, job.run_id, job.step_id, self.stage.next, said[-1], (), 1))
        self.stage.next += 1

    def is_lost(self, stream: JobStream) -> None:
        leader = stream.attempt.job.job_id
        # A streaming reader that has heard a part of what is void is told so, as soon as there is news.
        self.torn |= {job_id for job_id, one in self.present.items() if one.job.stream and self.said[leader]}
        stream.begin_attempt(Attempt(stream.attempt.job), from_start=True)
        self.stage.next, self.said[leader] = 0, []

    def act(self, act: str, value: int) -> None:
        stream = self.running()
        if act == "arrives":
            self.arrives(bool(value))
        elif act == "leaves" and value < len(self.present):
            self.leaves(value)
        elif stream is None:
            return
        elif act == "says":
            self.says(stream)
        elif act == "is lost" and not stream.attempt.job.stream:
            if value or not self.said[stream.attempt.job.job_id]:
                self.is_lost(stream)
        elif act == "is cut short":
            self.finish(lambda job_id: Done(job_id, FinishReason.LENGTH, Usage(), stopped=RunBudgetExhausted("spent")))

    async def settle(self) -> None:
        """Readers hear of their ends; an execution without readers is cancelled."""
        for job_id in [job_id for job_id in self.present if job_id in self.ends]:
            del self.present[job_id]
        await asyncio.sleep(0)
        stream = self.running()
        if stream is not None:
            leader = stream.attempt.job.job_id
            wanted = [reader for reader in self.present.values() if reader.attempt.job.job_id == leader]
            assert (leader in self.stage.cancelled) == (not wanted)
            if not wanted:
                self.finish(lambda job_id: Failed(job_id, ClientClosed("cancelled")))

    def check(self) -> None:
        """End what runs: every reader has one end, and nothing is left."""
        stage, stream = self.stage, self.running()
        leader = "" if stream is None else stream.attempt.job.job_id
        self.finish(lambda job_id: Done(job_id, FinishReason.STOP, Usage()))
        for job_id in self.present:
            assert isinstance(self.ends[job_id], Failed) == (job_id in self.torn)
            assert job_id in self.torn or self.heard[job_id][1] == "".join(self.said[leader])
        assert (stage.tickets, len(stage.demux), len(stage.flights), stage.flights.bytes_held) == (0, 0, 0, 0)
        assert not stage.flights._subscribers
        assert not stage.flights._executions._by_prompt
        assert len(stage.accounts) == len(set(stage.accounts))


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(ACTS, max_size=30))
def test_in_any_order_remaining_subscribers_get_the_answer_and_unwanted_executions_are_cancelled(
    acts: list[tuple[str, int]],
) -> None:
    async def scenario() -> None:
        play = Play()
        for act, value in acts:
            before = play.running()
            play.act(act, value)
            if act in ("arrives", "leaves") or before is not None:
                await play.settle()
        play.check()

    asyncio.run(scenario())
