"""Calls that are the same share one execution: while it runs, and for a while after, where that is asked for.

Three ways to share, all within one tenant. *Identical*: two deterministic calls with equal bodies. *Joined*: the same
call made again, known by its run and step or its idempotency key, whatever its temperature. *Replayed*: that call after
its end, where its answer was kept.

The job that came first leads: it is the one that is queued, runs, is charged and has the ledger's account of the work.
Those that follow have readers of their own and an account with nothing in it. The execution is cancelled when its last
reader has left. Where it ends for a reason that is the leader's own, such as its budget or its deadline, followers that
have seen nothing yet get an execution of their own.

Belongs to one event loop; nothing here waits.
"""

import asyncio
from typing import Literal, Protocol

from inferry.dispatch.replays import Key, Replays
from inferry.dispatch.sameness import Question, digest, is_deterministic
from inferry.dispatch.values import Kept, Sharing
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    ClientClosed,
    DeadlineInfeasible,
    GatewayError,
    InvalidApiKey,
    QueueTimeout,
    RunBudgetExhausted,
    RunCancelled,
    TenantBudgetExhausted,
    WorkerLost,
)
from inferry.domain.jobs import InferenceJob, SoFar
from inferry.domain.ledger import LedgerEntry
from inferry.domain.streams import Delta, Done, End, Failed
from inferry.domain.values import replace
from inferry.streams.mailbox import JobStream, MergeTally
from inferry.streams.shared import Memory, Reader, Shared

Kind = Literal["identical", "joined", "replayed"]
KINDS: tuple[Kind, ...] = ("identical", "joined", "replayed")

MOST_COMPARED = 8
"""How many executions with the same prompt hash are looked at: the newest ones."""
LONGEST_LINGER_S = 60.0

_Prompt = tuple[str, str, int | None]
_OWN_MATTERS = (
    ClientClosed,
    DeadlineInfeasible,
    InvalidApiKey,
    QueueTimeout,
    RunBudgetExhausted,
    RunCancelled,
    TenantBudgetExhausted,
)


class Ticket(Protocol):
    """A follower's right to be there: it counts as a request and as a step of its run, and for no tokens."""

    def ended(self, attempt: Attempt) -> None:
        """The follower has its end, as this attempt that used nothing."""

    def withdraw(self) -> None:
        """The follower is to have an execution of its own after all."""


class House(Protocol):
    """What sharing needs of the gateway."""

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        """Let the job in as any other, or raise why not."""

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> None: ...

    def admit_follower(self, job: InferenceJob, caller: Caller) -> Ticket:
        """Let in a job that costs nothing, or raise why not."""

    def follower_ended(self, entry: LedgerEntry) -> None:
        """Account for it."""

    def shared(self, kind: Kind) -> None:
        """A job shares another's execution."""

    def unshared(self) -> None:
        """It no longer does: it gets one of its own."""


class _Flight(Shared):
    """One execution that others may share, and where it can be found."""

    __slots__ = ("_flights", "call", "job", "keep", "left_with", "linger_s", "lingering", "prompt", "question")

    def __init__(self, job: InferenceJob, source: JobStream, memory: Memory, flights: "Flights") -> None:
        self._flights = flights
        self.job = job
        self.question = Question(job)
        self.prompt: _Prompt | None = None
        self.call: Key | None = None
        self.keep = False
        self.linger_s = 0.0
        self.lingering: asyncio.TimerHandle | None = None
        self.left_with: GatewayError | None = None  # why its own reader has left
        super().__init__(source, memory)

    def _over(self, end: End) -> None:
        self._flights.over(self, end)

    def _torn(self, reader: Reader) -> None:
        self._flights.torn(self, reader)


class _Seat(Reader):
    """One reader of a flight. Who leads has no ticket: its job has been let in as any other."""

    __slots__ = ("caller", "expiry", "flight", "ticket")

    flight: _Flight

    def __init__(
        self, job: InferenceJob, attempt: Attempt, tally: MergeTally, shared_with: str | None, caller: Caller
    ) -> None:
        super().__init__(job, attempt, tally, shared_with)
        self.caller = caller
        self.ticket: Ticket | None = None
        self.expiry: asyncio.TimerHandle | None = None


class Flights:
    """Who shares what."""

    def __init__(self, sharing: Sharing, house: House, clock: Clock) -> None:
        self._sharing = sharing
        self._house = house
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._memory = Memory(sharing.history_bytes, sharing.history_bytes_of_one)
        self._by_prompt: dict[_Prompt, list[_Flight]] = {}
        self._by_call: dict[Key, _Flight] = {}
        self._by_leader: dict[str, _Flight] = {}
        self._seats: dict[str, _Seat] = {}
        self._replays = Replays(sharing.keep_bytes)
        self._expiring: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_leader)

    @property
    def bytes_held(self) -> int:
        """What is kept of answers that are being written, and of those that are over."""
        return self._memory.used + self._replays.used

    def may_share(self, job: InferenceJob) -> bool:
        """Whether the job may share, or others with it. Those that may not pay for nothing but this question."""
        if job.repeat is not None:
            return True
        sampling = job.payload.sampling  # `is_deterministic`, without the call
        return (sampling.temperature == 0.0 or sampling.seed is not None) and self._sharing.identical

    def submit(self, job: InferenceJob, caller: Caller) -> Reader:
        """The job's stream: a share in somebody's execution, or one of its own that others may share."""
        if job.repeat is not None and job.repeat.fresh:
            return self._lead(job, caller)
        if (kept := self._kept(job)) is not None:
            return self._replay(kept, job, caller)
        return self._board(job, caller)

    def concerns(self, job_id: str) -> bool:
        """Whether the job shares an execution, or others may share its own."""
        return job_id in self._seats or job_id in self._by_leader

    def readers(self) -> list[InferenceJob]:
        """The jobs that read along, or whose own execution others may share."""
        return [seat.job for seat in self._seats.values()]

    def leave(self, job_id: str, error: GatewayError | None) -> bool:
        """A reader leaves, for its own reason. False where the job's execution is what is to be cancelled."""
        seat = self._seats.get(job_id)
        if seat is None:
            led = self._by_leader.get(job_id)
            if led is None:
                return False
            if led.readers:
                return True  # its own reader has left before; it goes on for as long as somebody else reads it
            self._unlist(led)
            return False
        flight = seat.flight
        is_last = flight.readers == (seat,)
        lingers = is_last and error is None and flight.linger_s > 0 and flight.is_joinable
        if is_last and not lingers:
            self._unlist(flight)  # nobody joins what is about to be cancelled
            if seat.ticket is None:
                return False  # its end comes with that of the execution
        flight.leave(seat)
        if seat.ticket is None:
            flight.left_with = error
        self._end(seat, Failed(job_id, error or ClientClosed("the client closed the connection")))
        if lingers:
            flight.lingering = self._loop.call_later(flight.linger_s, self._give_up, flight)
        elif is_last:
            self._house.cancel_execution(flight.job.job_id, flight.left_with)
        return True

    def close(self) -> None:
        """No timer of this outlives the gateway."""
        timers = [self._expiring, *(flight.lingering for flight in self._by_leader.values())]
        for timer in (*timers, *(seat.expiry for seat in self._seats.values())):
            if timer is not None:
                timer.cancel()

    # -- finding -----------------------------------------------------------------------------------------------------

    def _again_of(self, job: InferenceJob) -> _Flight | None:
        """The call that this one is again, in flight."""
        call = _call_of(job)
        flight = None if call is None else self._by_call.get(call)
        return flight if flight is not None and flight.is_joinable and flight.question.is_asked_by(job) else None

    def _kept(self, job: InferenceJob) -> Kept | None:
        """The answer to the call that this one is again."""
        call = _call_of(job)
        kept = None if call is None else self._replays.find(call, self._clock.now())
        return kept if kept is not None and kept.digest == digest(job) else None

    def _identical(self, job: InferenceJob) -> _Flight | None:
        """An execution in flight that answers this job too, and for which it would not wait longer than for its own."""
        if not (self._sharing.identical and is_deterministic(job)):
            return None
        for flight in reversed(self._by_prompt.get(_prompt_of(job), ())[-MOST_COMPARED:]):
            leader = flight.job
            is_queued = flight.source.attempt.sent_at is None
            if (
                leader.lane <= job.lane
                and not (is_queued and leader.arrived_at + leader.max_wait_s > job.arrived_at + job.max_wait_s)
                and flight.is_joinable
                and flight.question.is_asked_by(job)
            ):
                return flight
        return None

    def _list(self, flight: _Flight, executed: InferenceJob) -> None:
        job = flight.job
        self._by_leader[job.job_id] = flight
        # What a budget cuts short is an answer to nobody else.
        if self._sharing.identical and is_deterministic(job) and executed.payload.output_cap is None:
            flight.prompt = _prompt_of(job)
            self._by_prompt.setdefault(flight.prompt, []).append(flight)
        flight.call = _call_of(job)
        if flight.call is not None:
            self._by_call[flight.call] = flight

    def _unlist(self, flight: _Flight) -> None:
        if flight.prompt is not None:
            same = self._by_prompt[flight.prompt]
            same.remove(flight)
            if not same:
                del self._by_prompt[flight.prompt]
            flight.prompt = None
        if flight.call is not None and self._by_call.get(flight.call) is flight:
            del self._by_call[flight.call]
        if flight.lingering is not None:
            flight.lingering.cancel()
            flight.lingering = None

    # -- sharing -----------------------------------------------------------------------------------------------------

    def _board(self, job: InferenceJob, caller: Caller, moved: _Seat | None = None) -> _Seat:
        if (flight := self._again_of(job)) is not None:
            return self._join(flight, job, caller, "joined", moved)
        if (flight := self._identical(job)) is not None:
            return self._join(flight, job, caller, "identical", moved)
        return self._lead(job, caller, moved)

    def _lead(self, job: InferenceJob, caller: Caller, moved: _Seat | None = None) -> _Seat:
        """Run the job, for its own reader first: a new one, or one that has moved here."""
        stream = self._house.execute(job, caller)
        flight = _Flight(job, stream, self._memory, self)
        self._list(flight, stream.attempt.job)
        return self._sit(flight, job, caller, None, None, moved)

    def _join(
        self, flight: _Flight, job: InferenceJob, caller: Caller, kind: Kind, moved: _Seat | None = None
    ) -> _Seat:
        """Read along with an execution in flight, from its beginning."""
        ticket = self._house.admit_follower(job, caller)
        self._house.shared(kind)
        if flight.lingering is not None:
            flight.lingering.cancel()
            flight.lingering = None
        seat = self._sit(flight, job, caller, flight.job.job_id, ticket, moved)
        if job.deadline is not None and seat.attempt.sent_at is None:
            left_s = max(0.0, job.deadline - self._clock.now())
            seat.expiry = self._loop.call_later(left_s, self._expire, seat)
        return seat

    def _sit(
        self,
        flight: _Flight,
        job: InferenceJob,
        caller: Caller,
        shared_with: str | None,
        ticket: Ticket | None,
        moved: _Seat | None,
    ) -> _Seat:
        attempt = flight.source.attempt
        if moved is None:
            seat = _Seat(job, attempt, flight.tally, shared_with, caller)
        else:
            seat = moved
            seat.shared_with = shared_with
            seat.start_over(attempt, has_begun=seat.flight.has_begun)
        seat.flight = flight
        seat.ticket = ticket
        repeat = job.repeat
        if repeat is not None and repeat.name is not None:
            linger_s = self._sharing.linger_s if repeat.linger_s is None else repeat.linger_s
            flight.keep |= repeat.keep
            flight.linger_s = max(flight.linger_s, min(linger_s, LONGEST_LINGER_S))
        self._seats[job.job_id] = seat
        flight.join(seat)
        return seat

    def _replay(self, kept: Kept, job: InferenceJob, caller: Caller) -> Reader:
        """The answer that was kept, at once."""
        ticket = self._house.admit_follower(job, caller)
        self._house.shared("replayed")
        # Nothing of the body is needed any more but how its answer is written.
        attempt = Attempt(replace(job, so_far=SoFar((), ())) if kept.was_continued else job)
        seat = _Seat(job, attempt, MergeTally(), kept.job_id, caller)
        seat.is_replay = True
        seat.ticket = ticket
        if kept.delta is not None:
            seat.hear(kept.delta, len(kept.delta.raw) + len(kept.delta.text))
        self._end(seat, kept.done)
        return seat

    # -- ends --------------------------------------------------------------------------------------------------------

    def over(self, flight: _Flight, end: End) -> None:
        """The execution has ended: so have its readers, but for those whose end it is not."""
        lingers = flight.lingering is not None
        self._unlist(flight)
        del self._by_leader[flight.job.job_id]
        if flight.call is not None and (flight.keep or lingers) and isinstance(end, Done) and end.stopped is None:
            self._keep(flight, flight.call, end)
        is_own_matter = end.stopped is not None if isinstance(end, Done) else isinstance(end.error, _OWN_MATTERS)
        left_alone: list[_Seat] = []
        for reader in flight.readers:
            seat = self._seats[reader.job.job_id]
            if seat.ticket is None or not is_own_matter:
                self._end(seat, end)
            elif flight.has_begun and seat.job.stream:
                self._end(seat, end if isinstance(end, Done) else _broken_off(seat))
            else:
                left_alone.append(seat)
        for seat in left_alone:
            self._again(seat, end)

    def _again(self, seat: _Seat, end: End) -> None:
        """What the follower shared has ended for a reason that is not the follower's."""
        job, ticket = seat.job, seat.ticket
        self._stand_up(seat)
        assert ticket is not None, "who leads has the end that there is"
        ticket.withdraw()
        try:
            self._board(job, seat.caller, seat)
            self._house.unshared()
        except GatewayError as refusal:
            own_end = end if isinstance(end, Done) else Failed(job.job_id, refusal)
            self._house.follower_ended(self._account(seat, self._as_if_run(seat, own_end)))
            seat.finish(own_end)

    def torn(self, flight: _Flight, reader: Reader) -> None:
        """The execution begins anew, and this reader's client has seen a part of what is void."""
        self._end(self._seats[reader.job.job_id], _broken_off(reader))
        self._loop.call_soon(self._cancel_if_alone, flight)

    def _cancel_if_alone(self, flight: _Flight) -> None:
        if not flight.readers and flight.job.job_id in self._by_leader:
            self._give_up(flight)

    def _expire(self, seat: _Seat) -> None:
        """The follower's own deadline has come."""
        attempt, job = seat.flight.source.attempt, seat.job
        if attempt.sent_at is None and attempt.job.so_far is None:
            waited = (self._clock.now() - job.arrived_at) * 1000
            error = QueueTimeout(f"the deadline passed after {waited:.0f} ms in the queue of lane {job.lane.name}")
            self.leave(job.job_id, error)

    def _give_up(self, flight: _Flight) -> None:
        """Nobody is left, or comes back."""
        self._unlist(flight)
        self._house.cancel_execution(flight.job.job_id, flight.left_with)

    def _end(self, seat: _Seat, end: End) -> None:
        """The reader's end, and a follower's account."""
        ticket = seat.ticket
        self._stand_up(seat)
        if ticket is not None:
            attempt = self._as_if_run(seat, end)
            self._house.follower_ended(self._account(seat, attempt))
            ticket.ended(attempt)
        seat.finish(end)

    def _stand_up(self, seat: _Seat) -> None:
        self._seats.pop(seat.job.job_id, None)
        if seat.expiry is not None:
            seat.expiry.cancel()
            seat.expiry = None

    def _as_if_run(self, reader: Reader, end: End) -> Attempt:
        """What a follower has been through: it waited no longer than since it came."""
        ran, arrived_at = reader.attempt, reader.job.arrived_at
        own = Attempt(reader.job)
        own.plan, own.batch_size = ran.plan, ran.batch_size
        own.sent_at = None if ran.sent_at is None else max(ran.sent_at, arrived_at)
        own.first_token_at = None if ran.first_token_at is None else max(ran.first_token_at, arrived_at)
        own.ended(end, self._clock.now())
        return own

    def _account(self, reader: Reader, attempt: Attempt) -> LedgerEntry:
        """A follower got what it got, and used nothing."""
        return replace(
            attempt.entry(self._clock.wall(), 0),
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            gpu_seconds=0.0,
            shared_with=reader.shared_with,
        )

    # -- keeping -----------------------------------------------------------------------------------------------------

    def _keep(self, flight: _Flight, call: Key, done: Done) -> None:
        delta: Delta | None = flight.whole()
        if delta is None and flight.has_begun:
            return  # too long to be kept
        keep_s = self._sharing.keep_s if flight.keep else flight.linger_s
        until = self._clock.now() + keep_s
        was_continued = flight.source.attempt.job.so_far is not None
        self._replays.keep(call, Kept(flight.job.job_id, digest(flight.job), delta, done, was_continued, until))
        if self._expiring is None:
            self._expiring = self._loop.call_later(keep_s, self._expire_kept)

    def _expire_kept(self) -> None:
        self._expiring = None
        now = self._clock.now()
        due = self._replays.expire(now)
        if due is not None:
            self._expiring = self._loop.call_later(max(0.1, due - now), self._expire_kept)


def _call_of(job: InferenceJob) -> Key | None:
    """Where calls meet that are the same one, as their client says."""
    return None if job.repeat is None or job.repeat.name is None else (job.tenant, job.repeat.name)


def _prompt_of(job: InferenceJob) -> _Prompt:
    """Where jobs that may be identical meet: cheap to have, and short of proof."""
    return job.tenant, job.prompt_hash, job.payload.sampling.seed


def _broken_off(reader: Reader) -> Failed:
    return Failed(reader.job.job_id, WorkerLost("what the call shared broke off after its answer had begun"))
