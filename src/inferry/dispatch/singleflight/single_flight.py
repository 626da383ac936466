"""Identical calls share one execution: while it runs, and for a while after, where the client asks for it.

Three ways to share, all within one tenant. *Identical*: two deterministic calls with equal bodies. *Joined*: the same
call made again, identified by its run and step or its idempotency key, whatever its temperature. *Replayed*: that call
after its end, where its answer was cached.

The first job leads: it is queued, runs, is charged, and has the ledger entry of the work. Followers have readers of
their own and an entry without usage. The execution is cancelled when its last reader has left. Where it ends for a
reason of the leader alone, such as its budget or its deadline, followers that have read nothing yet get an execution of
their own.

Belongs to one event loop; nothing here waits.
"""

import asyncio
from typing import Final, Literal, Protocol

from inferry.dispatch.cancel_sender import PendingCancel
from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.singleflight.execution import (
    Execution,
    FollowerTicket,
    Subscriber,
    follower_attempt,
    follower_entry,
)
from inferry.dispatch.singleflight.execution_index import ExecutionIndex, repeat_key
from inferry.dispatch.singleflight.request_key import digest
from inferry.dispatch.singleflight.response_cache import RepeatKey, ResponseCache
from inferry.dispatch.values import CachedResponse, Sharing
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    ClientClosed,
    DeadlineExceeded,
    DeadlineInfeasible,
    GatewayError,
    InvalidApiKey,
    QueueTimeout,
    RequestTimeout,
    RunBudgetExhausted,
    RunCancelled,
    TenantBudgetExhausted,
    WorkerLost,
)
from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.ledger import LedgerEntry
from inferry.domain.streams import Delta, Done, End, Failed
from inferry.domain.values import replace
from inferry.streams.fan_out import HistoryBudget, Reader
from inferry.streams.mailbox import JobStream, MergeCounter

SharingKind = Literal["identical", "joined", "replayed"]
SHARING_KINDS: tuple[SharingKind, ...] = ("identical", "joined", "replayed")

MAX_LINGER_S: Final = 60.0

_LEADER_ONLY_ERRORS = (
    ClientClosed,
    DeadlineExceeded,
    DeadlineInfeasible,
    InvalidApiKey,
    QueueTimeout,
    RequestTimeout,
    RunBudgetExhausted,
    RunCancelled,
    TenantBudgetExhausted,
)


class Host(Protocol):
    """What runs jobs."""

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        """Admit and run the job, or raise its refusal."""

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> PendingCancel | None: ...

    def admit_follower(self, job: InferenceJob, caller: Caller) -> FollowerTicket:
        """Admit a job that uses nothing, or raise its refusal."""

    def follower_ended(self, job: InferenceJob, entry: LedgerEntry) -> None:
        """Account for it."""

    def shared(self, kind: SharingKind) -> None:
        """A job shares another's execution."""

    def unshared(self) -> None:
        """A job that shared an execution gets one of its own."""


class SingleFlight:
    """The shared executions and their subscribers."""

    def __init__(self, sharing: Sharing, host: Host, clock: Clock, deadlines: Deadlines) -> None:
        self._sharing = sharing
        self._host = host
        self._deadlines = deadlines
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._history_budget = HistoryBudget(sharing.join_history_max_bytes, sharing.history_bytes_per_execution)
        self._executions = ExecutionIndex(sharing.identical)
        self._subscribers: dict[str, Subscriber] = {}
        self._response_cache = ResponseCache(sharing.replay_max_bytes)
        self._expiry_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._executions)

    @property
    def bytes_held(self) -> int:
        """Bytes of running answers kept for followers, and of cached answers."""
        return self._history_budget.used + self._response_cache.used

    def may_share(self, job: InferenceJob) -> bool:
        """Whether the job may share an execution, or others its own. Jobs that may not cost only this check.

        A job that resumes begins in the middle of an answer, where no other begins.
        """
        if job.resume_point is not None:
            return False
        if job.repeat is not None:
            return self._sharing.repeats
        sampling = job.payload.sampling  # `is_deterministic`, without the call
        return (sampling.temperature == 0.0 or sampling.seed is not None) and self._sharing.identical

    def submit(self, job: InferenceJob, caller: Caller) -> Reader:
        """The job's stream: of a shared execution, or of one of its own that others may share."""
        if job.job_id in self._subscribers:
            raise ValueError(f"job {job.job_id} is in flight already")
        if job.repeat is not None and job.repeat.fresh:
            return self._start_execution(job, caller)
        if (cached := self._find_cached(job)) is not None:
            return self._replay(cached, job, caller)
        return self._attach(job, caller)

    def involves(self, job_id: str) -> bool:
        """Whether the job shares an execution, or others may share its own."""
        return job_id in self._subscribers or self._executions.led_by(job_id) is not None

    def has_left(self, job_id: str) -> bool:
        """Whether the job has ended for its own reader, while its execution continues for others."""
        execution = self._executions.led_by(job_id)
        return execution is not None and job_id not in self._subscribers and bool(execution.readers)

    def readers(self) -> list[InferenceJob]:
        """The jobs that share an execution, or whose own others may share."""
        return [subscriber.job for subscriber in self._subscribers.values()]

    def cancel(self, job_id: str, error: GatewayError | None) -> PendingCancel | None:
        """End a job for its own reason: its reader leaves, and the execution is cancelled with its last reader.

        Returns the cancel of the execution, if there is one.
        """
        subscriber = self._subscribers.get(job_id)
        if subscriber is None:
            if self.has_left(job_id):
                return None
            if (led_execution := self._executions.led_by(job_id)) is not None:
                self._executions.hide(led_execution)
            return self._host.cancel_execution(job_id, error)
        execution = subscriber.execution
        is_last_reader = execution.readers == (subscriber,)
        is_lingering = is_last_reader and error is None and execution.linger_s > 0 and execution.is_joinable
        if is_last_reader and not is_lingering:
            self._executions.hide(execution)  # no job may join what is about to be cancelled
            if subscriber.ticket is None:
                return self._host.cancel_execution(job_id, error)  # its end comes with that of the execution
        execution.leave(subscriber)
        if subscriber.ticket is None:
            execution.leave_error = error
        self._end(subscriber, Failed(job_id, error or ClientClosed("the client closed the connection")))
        if is_lingering:
            execution.linger_timer = self._loop.call_later(execution.linger_s, self._cancel_abandoned, execution)
        elif is_last_reader:
            return self._host.cancel_execution(execution.job.job_id, execution.leave_error)
        return None

    def close(self) -> None:
        """Cancel all timers."""
        timers = [self._expiry_timer, *(execution.linger_timer for execution in self._executions)]
        for timer in (*timers, *(subscriber.expiry for subscriber in self._subscribers.values())):
            if timer is not None:
                timer.cancel()

    # -- sharing -----------------------------------------------------------------------------------------------------

    def _find_cached(self, job: InferenceJob) -> CachedResponse | None:
        """The cached answer of the call that this one repeats."""
        call = repeat_key(job)
        cached = None if call is None else self._response_cache.find(call, self._clock.now())
        return cached if cached is not None and cached.digest == digest(job) else None

    def _attach(self, job: InferenceJob, caller: Caller, migrated: Subscriber | None = None) -> Subscriber:
        if (execution := self._executions.find_repeat(job)) is not None:
            return self._join(execution, job, caller, "joined", migrated)
        if (execution := self._executions.find_identical(job)) is not None:
            return self._join(execution, job, caller, "identical", migrated)
        return self._start_execution(job, caller, migrated)

    def _start_execution(self, job: InferenceJob, caller: Caller, migrated: Subscriber | None = None) -> Subscriber:
        """Run the job for its own reader: a new one, or one that has migrated from an ended execution."""
        stream = self._host.execute(job, caller)
        execution = Execution(job, stream, self._history_budget, self)
        self._executions.add(execution, stream.attempt.job)
        return self._subscribe(execution, job, caller, None, None, migrated)

    def _join(
        self,
        execution: Execution,
        job: InferenceJob,
        caller: Caller,
        kind: SharingKind,
        migrated: Subscriber | None = None,
    ) -> Subscriber:
        """Subscribe to an execution in flight, from its beginning."""
        if job.job_id == execution.job.job_id:
            # Stored work that was stopped here and has come back: the execution that outlived its reader is its own.
            execution.stop_lingering()
            execution.leave_error = None
            return self._subscribe(execution, job, caller, None, None, migrated)
        ticket = self._host.admit_follower(job, caller)
        self._host.shared(kind)
        execution.stop_lingering()
        subscriber = self._subscribe(execution, job, caller, execution.job.job_id, ticket, migrated)
        if (expiry := self._deadlines.expiry(job)) is not None:
            left_s = max(0.0, expiry[0] - self._clock.now())
            subscriber.expiry = self._loop.call_later(left_s, self._expire, subscriber, expiry[1])
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
        """The cached answer, at once."""
        ticket = self._host.admit_follower(job, caller)
        self._host.shared("replayed")
        # Of the body only the shape of its answer is needed.
        attempt = Attempt(replace(job, resume_point=ResumePoint((), ())) if cached.was_resumed else job)
        attempt.ended(cached.done, self._clock.now())
        subscriber = Subscriber(job, attempt, MergeCounter(), cached.job_id, caller)
        subscriber.is_replay = True
        subscriber.ticket = ticket
        if cached.delta is not None:
            subscriber.deliver(cached.delta, len(cached.delta.raw) + len(cached.delta.text))
        self._end(subscriber, cached.done)
        return subscriber

    # -- ends --------------------------------------------------------------------------------------------------------

    def execution_ended(self, execution: Execution, end: End) -> None:
        """The execution has ended: so have its readers, except followers for whom the reason does not hold."""
        is_lingering = execution.linger_timer is not None
        self._executions.remove(execution)
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
        """The follower's execution has ended for a reason that is not the follower's."""
        job, ticket = subscriber.job, subscriber.ticket
        self._unsubscribe(subscriber)
        assert ticket is not None, "the leader ends with its execution"
        ticket.withdraw()
        try:
            self._attach(job, subscriber.caller, subscriber)
            self._host.unshared()
        except GatewayError as refusal:
            end_for_follower = end if isinstance(end, Done) else Failed(job.job_id, refusal)
            attempt = follower_attempt(subscriber, end_for_follower, self._clock.now())
            self._host.follower_ended(subscriber.job, follower_entry(subscriber, attempt, self._clock.wall()))
            subscriber.finish(end_for_follower)

    def subscriber_detached(self, execution: Execution, reader: Reader) -> None:
        """The execution restarts, and this reader's client has read output that is void now."""
        self._end(self._subscribers[reader.job.job_id], _interrupted(reader))
        self._loop.call_soon(self._cancel_if_unread, execution)

    def _cancel_if_unread(self, execution: Execution) -> None:
        if not execution.readers and self._executions.led_by(execution.job.job_id) is execution:
            self._cancel_abandoned(execution)

    def _expire(self, subscriber: Subscriber, error: GatewayError) -> None:
        """The follower's deadline or request timeout has passed: it leaves, and the execution continues for others."""
        attempt, job = subscriber.execution.source.attempt, subscriber.job
        is_queued = attempt.sent_at is None and attempt.job.resume_point is None
        if is_queued and isinstance(error, DeadlineExceeded):
            waited = (self._clock.now() - job.arrived_at) * 1000
            error = QueueTimeout(f"the deadline passed after {waited:.0f} ms in the queue of lane {job.lane.name}")
        self.cancel(job.job_id, error)

    def _cancel_abandoned(self, execution: Execution) -> None:
        """The execution has no reader left."""
        self._executions.hide(execution)
        self._host.cancel_execution(execution.job.job_id, execution.leave_error)

    def _end(self, subscriber: Subscriber, end: End) -> None:
        """End a reader, and account for a follower."""
        ticket = subscriber.ticket
        self._unsubscribe(subscriber)
        if ticket is not None:
            attempt = follower_attempt(subscriber, end, self._clock.now())
            self._host.follower_ended(subscriber.job, follower_entry(subscriber, attempt, self._clock.wall()))
            ticket.ended(attempt)
        subscriber.finish(end)

    def _unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.pop(subscriber.job.job_id, None)
        subscriber.stop_expiry()

    # -- cached answers ----------------------------------------------------------------------------------------------

    def _cache_response(self, execution: Execution, call: RepeatKey, done: Done) -> None:
        delta: Delta | None = execution.merged_history()
        if delta is None and execution.has_started:
            return  # too long to be cached
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


def _interrupted(reader: Reader) -> Failed:
    return Failed(reader.job.job_id, WorkerLost("the shared execution was interrupted after output had been sent"))
