"""One shared execution, its subscribers, and the ledger entry of a follower."""

import asyncio
from typing import Protocol

from inferry.dispatch.singleflight.request_key import RequestKey
from inferry.dispatch.singleflight.response_cache import RepeatKey
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry
from inferry.domain.streams import End
from inferry.domain.values import replace
from inferry.streams.fan_out import FanOut, HistoryBudget, Reader
from inferry.streams.mailbox import JobStream, MergeCounter

PromptKey = tuple[str, str, int | None]


class FollowerTicket(Protocol):
    """A follower's admission: it counts as a request and as a step of its run, and for no tokens."""

    def ended(self, attempt: Attempt) -> None:
        """The follower has ended as this attempt, which used nothing."""

    def withdraw(self) -> None:
        """The follower gets an execution of its own."""


class ExecutionOwner(Protocol):
    """What an execution reports to."""

    def execution_ended(self, execution: "Execution", end: End) -> None: ...

    def subscriber_detached(self, execution: "Execution", reader: Reader) -> None: ...


class Execution(FanOut):
    """One execution that others may share, and the keys under which it is found."""

    __slots__ = (
        "_owner",
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
        self, job: InferenceJob, source: JobStream, history_budget: HistoryBudget, owner: ExecutionOwner
    ) -> None:
        self._owner = owner
        self.job = job
        self.request_key = RequestKey(job)
        self.prompt_key: PromptKey | None = None
        self.call: RepeatKey | None = None
        self.keep = False
        self.linger_s = 0.0
        self.linger_timer: asyncio.TimerHandle | None = None
        self.leave_error: GatewayError | None = None  # why the leader's own reader has left
        super().__init__(source, history_budget)

    def stop_lingering(self) -> None:
        if self.linger_timer is not None:
            self.linger_timer.cancel()
            self.linger_timer = None

    def _on_end(self, end: End) -> None:
        self._owner.execution_ended(self, end)

    def _on_reader_detached(self, reader: Reader) -> None:
        self._owner.subscriber_detached(self, reader)


class Subscriber(Reader):
    """One reader of an execution. The leader has no ticket: its job was admitted as any other."""

    __slots__ = ("caller", "execution", "expiry", "ticket")

    execution: Execution

    def __init__(
        self, job: InferenceJob, attempt: Attempt, merge_counter: MergeCounter, shared_with: str | None, caller: Caller
    ) -> None:
        super().__init__(job, attempt, merge_counter, shared_with)
        self.caller = caller
        self.ticket: FollowerTicket | None = None
        self.expiry: asyncio.TimerHandle | None = None

    def stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


def follower_attempt(reader: Reader, end: End, now: float) -> Attempt:
    """The attempt of a follower: its times begin with its own arrival."""
    shared_attempt, arrived_at = reader.attempt, reader.job.arrived_at
    own = Attempt(reader.job)
    own.plan, own.batch_size = shared_attempt.plan, shared_attempt.batch_size
    own.sent_at = None if shared_attempt.sent_at is None else max(shared_attempt.sent_at, arrived_at)
    own.first_token_at = (
        None if shared_attempt.first_token_at is None else max(shared_attempt.first_token_at, arrived_at)
    )
    own.ended(end, now)
    return own


def follower_entry(reader: Reader, attempt: Attempt, wall: float) -> LedgerEntry:
    """The ledger entry of a follower, which used nothing."""
    return replace(
        attempt.entry(wall, 0),
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        gpu_seconds=0.0,
        shared_with=reader.shared_with,
    )
