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


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(ACTS, max_size=30))
def test_in_any_order_remaining_subscribers_get_the_answer_and_unwanted_executions_are_cancelled(
    acts: list[tuple[str, int]],
) -> None:
    async def scenario() -> None:
        stage = Stage()
        said: dict[str, list[str]] = {}  # by execution
        present: dict[str, Any] = {}
        heard: dict[str, tuple[int, str]] = {}
        ends: dict[str, End] = {}
        torn: set[str] = set()

        def listens(reader: Any) -> None:
            job_id = reader.job.job_id

            def on_news() -> None:
                delta, end = reader.take_nowait()
                restarts, text = heard.get(job_id, (0, ""))
                if reader.restarts != restarts:
                    assert not reader.job.stream
                    restarts, text = reader.restarts, ""
                heard[job_id] = restarts, text + ("" if delta is None else delta.text)
                if end is not None:
                    assert job_id not in ends, "one end each"
                    ends[job_id] = end

            reader.listen(on_news)

        def running() -> JobStream | None:
            ids = stage.demux.job_ids()
            return stage.demux.get(ids[0]) if ids else None

        def over(end: Callable[[str], End]) -> None:
            stream = running()
            if stream is not None:
                job_id = stream.attempt.job.job_id
                stage.demux.close(stream, end(job_id))

        for act, value in acts:
            stream = running()
            leader = None if stream is None else stream.attempt.job.job_id
            if act == "arrives":
                job = a_job(sampling=GREEDY, stream=bool(value))
                reader = stage.flights.submit(job, ANONYMOUS)
                present[job.job_id] = reader
                listens(reader)
                said.setdefault(job.job_id, [])
                assert len(stage.demux) == 1
            elif act == "leaves" and value < len(present):
                job_id = list(present)[value]
                stage.flights.cancel(job_id, None)
                del present[job_id]
            elif stream is None or leader is None:
                continue
            elif act == "says":
                job = stream.attempt.job
                said[leader].append(f"{len(said[leader])} ")
                stream.push(Delta(leader, job.run_id, job.step_id, stage.next, said[leader][-1], (), 1))
                stage.next += 1
            elif act == "is lost" and (value or not said[leader]) and not stream.attempt.job.stream:
                # Who streams and has heard a part of what is void is told so, as soon as there is news.
                torn |= {job_id for job_id, one in present.items() if one.job.stream and said[leader]}
                stream.begin_attempt(Attempt(stream.attempt.job), from_start=True)
                stage.next, said[leader] = 0, []
            elif act == "is cut short":
                over(lambda job_id: Done(job_id, FinishReason.LENGTH, Usage(), stopped=RunBudgetExhausted("used up")))
            for job_id in [job_id for job_id in present if job_id in ends]:
                del present[job_id]
            await asyncio.sleep(0)
            stream = running()
            if stream is not None:
                leader = stream.attempt.job.job_id
                wanted = [reader for reader in present.values() if reader.attempt.job.job_id == leader]
                assert (leader in stage.cancelled) == (not wanted)
                if not wanted:
                    over(lambda job_id: Failed(job_id, ClientClosed("cancelled")))
        stream = running()
        leader = "" if stream is None else stream.attempt.job.job_id
        over(lambda job_id: Done(job_id, FinishReason.STOP, Usage()))
        for job_id in present:
            end = ends[job_id]
            assert isinstance(end, Failed) == (job_id in torn)
            assert job_id in torn or heard[job_id][1] == "".join(said[leader])
        assert (stage.tickets, len(stage.demux), len(stage.flights), stage.flights.bytes_held) == (0, 0, 0, 0)
        assert not stage.flights._subscribers
        assert not stage.flights._executions._by_prompt
        assert len(stage.accounts) == len(set(stage.accounts))

    asyncio.run(scenario())
