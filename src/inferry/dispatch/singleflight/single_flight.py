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

from inferry.dispatch.singleflight.request_key import RequestKey, digest, is_deterministic
from inferry.dispatch.singleflight.response_cache import RepeatKey, ResponseCache
from inferry.dispatch.values import CachedResponse, Sharing
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
from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.ledger import LedgerEntry
from inferry.domain.streams import Delta, Done, End, Failed
from inferry.domain.values import replace
from inferry.streams.fan_out import FanOut, HistoryBudget, Reader
from inferry.streams.mailbox import JobStream, MergeCounter

SharingKind = Literal["identical", "joined", "replayed"]
SHARING_KINDS: tuple[SharingKind, ...] = ("identical", "joined", "replayed")

MAX_COMPARED = 8
"""How many executions with the same prompt hash are looked at: the newest ones."""
MAX_LINGER_S = 60.0

_PromptKey = tuple[str, str, int | None]
_LEADER_ONLY_ERRORS = (
    ClientClosed,
    DeadlineInfeasible,
    InvalidApiKey,
    QueueTimeout,
    RunBudgetExhausted,
    RunCancelled,
    TenantBudgetExhausted,
)


class FollowerTicket(Protocol):
    """A follower's right to be there: it counts as a request and as a step of its run, and for no tokens."""

    def ended(self, attempt: Attempt) -> None:
        """The follower has its end, as this attempt that used nothing."""

    def withdraw(self) -> None:
        """The follower is to have an execution of its own after all."""


class Host(Protocol):
    """What sharing needs of the gateway."""

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        """Let the job in as any other, or raise why not."""

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> None: ...

    def admit_follower(self, job: InferenceJob, caller: Caller) -> FollowerTicket:
        """Let in a job that costs nothing, or raise why not."""

    def follower_ended(self, entry: LedgerEntry) -> None:
        """Account for it."""

    def shared(self, kind: SharingKind) -> None:
        """A job shares another's execution."""

    def unshared(self) -> None:
        """It no longer does: it gets one of its own."""


class Execution(FanOut):
    """One execution that others may share, and where it can be found."""

    __slots__ = (
        "_single_flight",
        "call",
        "job",
        "keep",
        "leave_error",
        "linger_s",
        "linger_timer",
        "prompt_key",
        "request_key",
    )

    def __init__(
        self, job: InferenceJob, source: JobStream, history_budget: HistoryBudget, flights: "SingleFlight"
    ) -> None:
        self._single_flight = flights
        self.job = job
        self.request_key = RequestKey(job)
        self.prompt_key: _PromptKey | None = None
        self.call: RepeatKey | None = None
        self.keep = False
        self.linger_s = 0.0
        self.linger_timer: asyncio.TimerHandle | None = None
        self.leave_error: GatewayError | None = None  # why its own reader has left
        super().__init__(source, history_budget)

    def _on_end(self, end: End) -> None:
        self._single_flight.execution_ended(self, end)

    def _on_reader_detached(self, reader: Reader) -> None:
        self._single_flight.subscriber_detached(self, reader)


class Subscriber(Reader):
    """One reader of a flight. Who leads has no ticket: its job has been let in as any other."""

    __slots__ = ("caller", "execution", "expiry", "ticket")

    execution: Execution

    def __init__(
        self, job: InferenceJob, attempt: Attempt, merge_counter: MergeCounter, shared_with: str | None, caller: Caller
    ) -> None:
        super().__init__(job, attempt, merge_counter, shared_with)
        self.caller = caller
        self.ticket: FollowerTicket | None = None
        self.expiry: asyncio.TimerHandle | None = None


class SingleFlight:
    """Who shares what."""

    def __init__(self, single_flight: Sharing, host: Host, clock: Clock) -> None:
        self._sharing = single_flight
        self._host = host
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._history_budget = HistoryBudget(
            single_flight.join_history_max_bytes, single_flight.history_bytes_per_execution
        )
        self._by_prompt: dict[_PromptKey, list[Execution]] = {}
        self._by_call: dict[RepeatKey, Execution] = {}
        self._by_leader: dict[str, Execution] = {}
        self._subscribers: dict[str, Subscriber] = {}
        self._response_cache = ResponseCache(single_flight.replay_max_bytes)
        self._expiry_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_leader)

    @property
    def bytes_held(self) -> int:
        """What is kept of answers that are being written, and of those that are over."""
        return self._history_budget.used + self._response_cache.used

    def may_share(self, job: InferenceJob) -> bool:
        """Whether the job may share, or others with it. Those that may not pay for nothing but this question."""
        if job.repeat is not None:
            return True
        sampling = job.payload.sampling  # `is_deterministic`, without the call
        return (sampling.temperature == 0.0 or sampling.seed is not None) and self._sharing.identical

    def submit(self, job: InferenceJob, caller: Caller) -> Reader:
        """The job's stream: a share in somebody's execution, or one of its own that others may share."""
        if job.repeat is not None and job.repeat.fresh:
            return self._start_execution(job, caller)
        if (cached := self._find_cached(job)) is not None:
            return self._replay(cached, job, caller)
        return self._attach(job, caller)

    def involves(self, job_id: str) -> bool:
        """Whether the job shares an execution, or others may share its own."""
        return job_id in self._subscribers or job_id in self._by_leader

    def readers(self) -> list[InferenceJob]:
        """The jobs that read along, or whose own execution others may share."""
        return [subscriber.job for subscriber in self._subscribers.values()]

    def leave(self, job_id: str, error: GatewayError | None) -> bool:
        """A reader leaves, for its own reason. False where the job's execution is what is to be cancelled."""
        subscriber = self._subscribers.get(job_id)
        if subscriber is None:
            led_execution = self._by_leader.get(job_id)
            if led_execution is None:
                return False
            if led_execution.readers:
                return True  # its own reader has left before; it goes on for as long as somebody else reads it
            self._unregister(led_execution)
            return False
        execution = subscriber.execution
        is_last_reader = execution.readers == (subscriber,)
        is_lingering = is_last_reader and error is None and execution.linger_s > 0 and execution.is_joinable
        if is_last_reader and not is_lingering:
            self._unregister(execution)  # nobody joins what is about to be cancelled
            if subscriber.ticket is None:
                return False  # its end comes with that of the execution
        execution.leave(subscriber)
        if subscriber.ticket is None:
            execution.leave_error = error
        self._end(subscriber, Failed(job_id, error or ClientClosed("the client closed the connection")))
        if is_lingering:
            execution.linger_timer = self._loop.call_later(execution.linger_s, self._cancel_abandoned, execution)
        elif is_last_reader:
            self._host.cancel_execution(execution.job.job_id, execution.leave_error)
        return True

    def close(self) -> None:
        """No timer of this outlives the gateway."""
        timers = [self._expiry_timer, *(execution.linger_timer for execution in self._by_leader.values())]
        for timer in (*timers, *(subscriber.expiry for subscriber in self._subscribers.values())):
            if timer is not None:
                timer.cancel()

    # -- finding -----------------------------------------------------------------------------------------------------

    def _find_repeat(self, job: InferenceJob) -> Execution | None:
        """The call that this one is again, in flight."""
        call = _repeat_key(job)
        execution = None if call is None else self._by_call.get(call)
        return (
            execution
            if execution is not None and execution.is_joinable and execution.request_key.matches(job)
            else None
        )

    def _find_cached(self, job: InferenceJob) -> CachedResponse | None:
        """The answer to the call that this one is again."""
        call = _repeat_key(job)
        cached = None if call is None else self._response_cache.find(call, self._clock.now())
        return cached if cached is not None and cached.digest == digest(job) else None

    def _find_identical(self, job: InferenceJob) -> Execution | None:
        """An execution in flight that answers this job too, and for which it would not wait longer than for its own."""
        if not (self._sharing.identical and is_deterministic(job)):
            return None
        for execution in reversed(self._by_prompt.get(_prompt_key_of(job), ())[-MAX_COMPARED:]):
            leader = execution.job
            is_queued = execution.source.attempt.sent_at is None
            if (
                leader.lane <= job.lane
                and not (is_queued and leader.arrived_at + leader.max_wait_s > job.arrived_at + job.max_wait_s)
                and execution.is_joinable
                and execution.request_key.matches(job)
            ):
                return execution
        return None

    def _register(self, execution: Execution, executed: InferenceJob) -> None:
        job = execution.job
        self._by_leader[job.job_id] = execution
        # What a budget cuts short is an answer to nobody else.
        if self._sharing.identical and is_deterministic(job) and executed.payload.output_cap is None:
            execution.prompt_key = _prompt_key_of(job)
            self._by_prompt.setdefault(execution.prompt_key, []).append(execution)
        execution.call = _repeat_key(job)
        if execution.call is not None:
            self._by_call[execution.call] = execution

    def _unregister(self, execution: Execution) -> None:
        if execution.prompt_key is not None:
            candidates = self._by_prompt[execution.prompt_key]
            candidates.remove(execution)
            if not candidates:
                del self._by_prompt[execution.prompt_key]
            execution.prompt_key = None
        if execution.call is not None and self._by_call.get(execution.call) is execution:
            del self._by_call[execution.call]
        if execution.linger_timer is not None:
            execution.linger_timer.cancel()
            execution.linger_timer = None

    # -- sharing -----------------------------------------------------------------------------------------------------

    def _attach(self, job: InferenceJob, caller: Caller, migrated: Subscriber | None = None) -> Subscriber:
        if (execution := self._find_repeat(job)) is not None:
            return self._join(execution, job, caller, "joined", migrated)
        if (execution := self._find_identical(job)) is not None:
            return self._join(execution, job, caller, "identical", migrated)
        return self._start_execution(job, caller, migrated)

    def _start_execution(self, job: InferenceJob, caller: Caller, migrated: Subscriber | None = None) -> Subscriber:
        """Run the job, for its own reader first: a new one, or one that has moved here."""
        stream = self._host.execute(job, caller)
        execution = Execution(job, stream, self._history_budget, self)
        self._register(execution, stream.attempt.job)
        return self._subscribe(execution, job, caller, None, None, migrated)

    def _join(
        self,
        execution: Execution,
        job: InferenceJob,
        caller: Caller,
        kind: SharingKind,
        migrated: Subscriber | None = None,
    ) -> Subscriber:
        """Read along with an execution in flight, from its beginning."""
        ticket = self._host.admit_follower(job, caller)
        self._host.shared(kind)
        if execution.linger_timer is not None:
            execution.linger_timer.cancel()
            execution.linger_timer = None
        subscriber = self._subscribe(execution, job, caller, execution.job.job_id, ticket, migrated)
        if job.deadline is not None and subscriber.attempt.sent_at is None:
            left_s = max(0.0, job.deadline - self._clock.now())
            subscriber.expiry = self._loop.call_later(left_s, self._expire, subscriber)
        return subscriber

    def _subscribe(
        self,
        execution: Execution,
        job: InferenceJob,
        caller: Caller,
        shared_with: str | None,
        ticket: FollowerTicket | None,
        migrated: Subscriber | None,
    ) -> Subscriber:
        attempt = execution.source.attempt
        if migrated is None:
            subscriber = Subscriber(job, attempt, execution.merge_counter, shared_with, caller)
        else:
            subscriber = migrated
            subscriber.shared_with = shared_with
            subscriber.restart(attempt, has_started=subscriber.execution.has_started)
        subscriber.execution = execution
        subscriber.ticket = ticket
        repeat = job.repeat
        if repeat is not None and repeat.name is not None:
            linger_s = self._sharing.linger_s if repeat.linger_s is None else repeat.linger_s
            execution.keep |= repeat.keep
            execution.linger_s = max(execution.linger_s, min(linger_s, MAX_LINGER_S))
        self._subscribers[job.job_id] = subscriber
        execution.join(subscriber)
        return subscriber

    def _replay(self, cached: CachedResponse, job: InferenceJob, caller: Caller) -> Reader:
        """The answer that was kept, at once."""
        ticket = self._host.admit_follower(job, caller)
        self._host.shared("replayed")
        # Nothing of the body is needed any more but how its answer is written.
        attempt = Attempt(replace(job, resume_point=ResumePoint((), ())) if cached.was_resumed else job)
        subscriber = Subscriber(job, attempt, MergeCounter(), cached.job_id, caller)
        subscriber.is_replay = True
        subscriber.ticket = ticket
        if cached.delta is not None:
            subscriber.deliver(cached.delta, len(cached.delta.raw) + len(cached.delta.text))
        self._end(subscriber, cached.done)
        return subscriber

    # -- ends --------------------------------------------------------------------------------------------------------

    def execution_ended(self, execution: Execution, end: End) -> None:
        """The execution has ended: so have its readers, but for those whose end it is not."""
        is_lingering = execution.linger_timer is not None
        self._unregister(execution)
        del self._by_leader[execution.job.job_id]
        if (
            execution.call is not None
            and (execution.keep or is_lingering)
            and isinstance(end, Done)
            and end.stopped is None
        ):
            self._cache_response(execution, execution.call, end)
        is_leader_only = (
            end.stopped is not None if isinstance(end, Done) else isinstance(end.error, _LEADER_ONLY_ERRORS)
        )
        orphaned: list[Subscriber] = []
        for reader in execution.readers:
            subscriber = self._subscribers[reader.job.job_id]
            if subscriber.ticket is None or not is_leader_only:
                self._end(subscriber, end)
            elif execution.has_started and subscriber.job.stream:
                self._end(subscriber, end if isinstance(end, Done) else _interrupted(subscriber))
            else:
                orphaned.append(subscriber)
        for subscriber in orphaned:
            self._reassign(subscriber, end)

    def _reassign(self, subscriber: Subscriber, end: End) -> None:
        """What the follower shared has ended for a reason that is not the follower's."""
        job, ticket = subscriber.job, subscriber.ticket
        self._unsubscribe(subscriber)
        assert ticket is not None, "who leads has the end that there is"
        ticket.withdraw()
        try:
            self._attach(job, subscriber.caller, subscriber)
            self._host.unshared()
        except GatewayError as refusal:
            end_for_follower = end if isinstance(end, Done) else Failed(job.job_id, refusal)
            self._host.follower_ended(
                self._follower_entry(subscriber, self._follower_attempt(subscriber, end_for_follower))
            )
            subscriber.finish(end_for_follower)

    def subscriber_detached(self, execution: Execution, reader: Reader) -> None:
        """The execution begins anew, and this reader's client has seen a part of what is void."""
        self._end(self._subscribers[reader.job.job_id], _interrupted(reader))
        self._loop.call_soon(self._cancel_if_unread, execution)

    def _cancel_if_unread(self, execution: Execution) -> None:
        if not execution.readers and execution.job.job_id in self._by_leader:
            self._cancel_abandoned(execution)

    def _expire(self, subscriber: Subscriber) -> None:
        """The follower's own deadline has come."""
        attempt, job = subscriber.execution.source.attempt, subscriber.job
        if attempt.sent_at is None and attempt.job.resume_point is None:
            waited = (self._clock.now() - job.arrived_at) * 1000
            error = QueueTimeout(f"the deadline passed after {waited:.0f} ms in the queue of lane {job.lane.name}")
            self.leave(job.job_id, error)

    def _cancel_abandoned(self, execution: Execution) -> None:
        """Nobody is left, or comes back."""
        self._unregister(execution)
        self._host.cancel_execution(execution.job.job_id, execution.leave_error)

    def _end(self, subscriber: Subscriber, end: End) -> None:
        """The reader's end, and a follower's account."""
        ticket = subscriber.ticket
        self._unsubscribe(subscriber)
        if ticket is not None:
            attempt = self._follower_attempt(subscriber, end)
            self._host.follower_ended(self._follower_entry(subscriber, attempt))
            ticket.ended(attempt)
        subscriber.finish(end)

    def _unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.pop(subscriber.job.job_id, None)
        if subscriber.expiry is not None:
            subscriber.expiry.cancel()
            subscriber.expiry = None

    def _follower_attempt(self, reader: Reader, end: End) -> Attempt:
        """What a follower has been through: it waited no longer than since it came."""
        shared_attempt, arrived_at = reader.attempt, reader.job.arrived_at
        own = Attempt(reader.job)
        own.plan, own.batch_size = shared_attempt.plan, shared_attempt.batch_size
        own.sent_at = None if shared_attempt.sent_at is None else max(shared_attempt.sent_at, arrived_at)
        own.first_token_at = (
            None if shared_attempt.first_token_at is None else max(shared_attempt.first_token_at, arrived_at)
        )
        own.ended(end, self._clock.now())
        return own

    def _follower_entry(self, reader: Reader, attempt: Attempt) -> LedgerEntry:
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

    def _cache_response(self, execution: Execution, call: RepeatKey, done: Done) -> None:
        delta: Delta | None = execution.merged_history()
        if delta is None and execution.has_started:
            return  # too long to be kept
        replay_ttl_s = self._sharing.replay_ttl_s if execution.keep else execution.linger_s
        until = self._clock.now() + replay_ttl_s
        was_resumed = execution.source.attempt.job.resume_point is not None
        self._response_cache.keep(
            call, CachedResponse(execution.job.job_id, digest(execution.job), delta, done, was_resumed, until)
        )
        if self._expiry_timer is None:
            self._expiry_timer = self._loop.call_later(replay_ttl_s, self._expire_cached)

    def _expire_cached(self) -> None:
        self._expiry_timer = None
        now = self._clock.now()
        due = self._response_cache.expire(now)
        if due is not None:
            self._expiry_timer = self._loop.call_later(max(0.1, due - now), self._expire_cached)


def _repeat_key(job: InferenceJob) -> RepeatKey | None:
    """Where calls meet that are the same one, as their client says."""
    return None if job.repeat is None or job.repeat.name is None else (job.tenant, job.repeat.name)


def _prompt_key_of(job: InferenceJob) -> _PromptKey:
    """Where jobs that may be identical meet: cheap to have, and short of proof."""
    return job.tenant, job.prompt_hash, job.payload.sampling.seed


def _interrupted(reader: Reader) -> Failed:
    return Failed(reader.job.job_id, WorkerLost("the shared execution was interrupted after output had been sent"))
