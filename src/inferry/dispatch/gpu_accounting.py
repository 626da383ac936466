"""GPU-seconds of attempts and workers: measured where the engine reports its steps, else estimated.

Belongs to the dispatch loop. Subscribes to `sent`, `first_token` and `ended`; `JobLifecycle` calls `meter` before an
attempt ends, so that its ledger entry and its cost have the GPU time. `refresh` divides the time of busy workers, and
`sample` closes intervals of all of them, for the metrics; every ROW_INTERVAL_S they become rows of the ledger.
"""

from collections.abc import Callable
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.ledger import GpuTimeKind, GpuTimeRow
from inferry.domain.streams import Usage
from inferry.domain.workers import WorkerView
from inferry.ledger.attribution import GpuTimeEstimator
from inferry.ledger.gpu_time import GpuTimeBook, waste_of

SETTLE_INTERVAL_S: Final = 0.25
ROW_INTERVAL_S: Final = 60.0
MAX_CLOCK_DRIFT_S: Final = 1.0
"""Rows follow each other without gaps. After a step of the wall clock by more than this, they follow it."""


class _WorkerAccount:
    """One worker. `charged_s` are engine seconds of its ended attempts, `sequence_s` the number of running sequences
    times seconds, `started` the latter when each attempt was sent.
    """

    __slots__ = (
        "book",
        "busy_s",
        "charged_s",
        "closed_at",
        "counted_at",
        "estimator",
        "foreign",
        "max_sequences",
        "own",
        "row_started_at",
        "sequence_s",
        "settled_at",
        "started",
        "total_busy_s",
        "unattributed_s",
        "waiting",
    )

    def __init__(self, view: WorkerView, now: float, wall: float) -> None:
        self.book = GpuTimeBook(view.gpus)
        self.estimator = GpuTimeEstimator(now, view.chunk_tokens)
        self.busy_s = view.busy_s or 0.0
        self.total_busy_s = self.charged_s = self.unattributed_s = 0.0
        self.closed_at = self.settled_at = self.counted_at = now
        self.row_started_at = wall
        self.max_sequences = view.capacity.sequences
        self.own = self.waiting = self.foreign = 0
        self.sequence_s = 0.0
        self.started: dict[Attempt, float] = {}

    @property
    def running(self) -> int:
        """Sequences that the engine runs, as far as known."""
        return max(min(self.own, 1), self.own - self.waiting) + self.foreign

    def advance(self, now: float) -> None:
        if now > self.counted_at:
            self.sequence_s += self.running * (now - self.counted_at)
            self.counted_at = now

    def settle(self, view: WorkerView, now: float) -> None:
        """Divide the time since the last settlement among the attempts."""
        self.settled_at = now
        self.advance(now)
        self.max_sequences = view.capacity.sequences
        self.waiting, self.foreign = view.load.waiting, view.foreign.running
        self.estimator.settle(now, view.counts, view.counted_at, view.load)

    def close_interval(self, view: WorkerView, now: float) -> None:
        self.settle(view, now)
        before_s = self.total_busy_s
        if view.busy_s is None:
            self.total_busy_s = self.estimator.busy_s
            unattributed_s = self.estimator.unattributed_s
        else:
            # A smaller value is that of a restarted engine.
            self.total_busy_s += view.busy_s - (self.busy_s if view.busy_s >= self.busy_s else 0.0)
            self.busy_s = view.busy_s
            # With attempts in flight, the time that is not charged yet may be theirs.
            unattributed_s = self.unattributed_s if self.started else self.total_busy_s - self.charged_s
        if unattributed_s > self.unattributed_s:
            self.book.move(GpuTimeKind.UNATTRIBUTED, (unattributed_s - self.unattributed_s) * self.book.gpus)
            self.unattributed_s = unattributed_s
        self.book.close_interval(now - self.closed_at, self.total_busy_s - before_s)
        self.closed_at = now

    def rows(self, worker: str, wall: float) -> list[GpuTimeRow]:
        taken = self.book.take_row()
        started_at = self.row_started_at
        ended_at = started_at + sum(taken.values()) / self.book.gpus
        self.row_started_at = ended_at if abs(wall - ended_at) <= MAX_CLOCK_DRIFT_S else wall
        return [
            GpuTimeRow(worker=worker, started_at=started_at, kind=kind.value, ended_at=ended_at, gpu_seconds=seconds)
            for kind, seconds in taken.items()
            if ended_at > started_at
        ]


class GpuAccounting:
    """`view_of` is the present view of a worker, None for one that is gone; `record` takes the rows of the ledger.

    `on_accrued` is called after each settlement with every running attempt and its GPU-seconds so far. `JobLifecycle`
    sets it where GPU time has a price.
    """

    def __init__(
        self,
        clock: Clock,
        view_of: Callable[[str], WorkerView | None],
        record: Callable[[GpuTimeRow], None],
    ) -> None:
        self._clock = clock
        self._view_of = view_of
        self._record = record
        self._accounts: dict[str, _WorkerAccount] = {}
        self._row_due_at = clock.now() + ROW_INTERVAL_S
        self.on_accrued: Callable[[Attempt, float], None] | None = None

    # -- workers -----------------------------------------------------------------------------------------------------

    def add_worker(self, view: WorkerView, now: float) -> None:
        """Account for the worker from now on, unless it is known or has no GPUs of its own."""
        if view.gpus > 0 and view.worker not in self._accounts:
            self._accounts[view.worker] = _WorkerAccount(view, now, self._clock.wall())

    def forget(self, worker: str) -> None:
        """The worker was removed; its last view is gone."""
        account = self._accounts.pop(worker, None)
        if account is not None:
            for row in account.rows(worker, self._clock.wall()):
                self._record(row)

    # -- events ------------------------------------------------------------------------------------------------------

    def sent(self, attempt: Attempt, now: float) -> None:
        account = self._account_of(attempt)
        if account is not None:
            account.advance(now)
            account.started[attempt] = account.sequence_s
            account.own += _sequences(attempt)
            account.estimator.sent(attempt, now)

    def first_token(self, attempt: Attempt, now: float) -> None:
        account = self._account_of(attempt)
        if account is not None:
            account.estimator.first_token(attempt, now)

    def meter(self, attempt: Attempt, usage: Usage, now: float) -> None:
        """Set the GPU time and the batch of an attempt that is about to end with this usage."""
        account = self._account_of(attempt)
        if account is None:
            return
        started_s = account.started.pop(attempt, None)
        share = account.estimator.ended(attempt, usage, now)
        if started_s is None or share is None or attempt.sent_at is None:
            return
        account.advance(now)
        elapsed_s = now - attempt.sent_at
        batch = (account.sequence_s - started_s) / elapsed_s if elapsed_s > 0 else float(account.running)
        account.own -= _sequences(attempt)
        attempt.engine_batch = batch
        attempt.batch_fill = min(1.0, batch / account.max_sequences) if account.max_sequences else None
        seconds = share.seconds if usage.gpu_seconds is None else usage.gpu_seconds
        account.charged_s += seconds
        attempt.gpu_estimated = usage.gpu_seconds is None
        attempt.gpu_seconds = seconds * account.book.gpus
        if share.seconds > 0:
            attempt.gpu_prefill_seconds = attempt.gpu_seconds * share.prefill_seconds / share.seconds

    def ended(self, attempt: Attempt, now: float) -> None:
        account, entry = self._account_of(attempt), attempt.ledger_entry
        if account is not None and entry is not None:
            kind, seconds = waste_of(attempt, entry.outcome)
            account.book.move(kind, seconds)

    # -- time --------------------------------------------------------------------------------------------------------

    def refresh(self, now: float) -> None:
        """Settle the workers that are due. Called often while jobs are in flight."""
        for worker, account in self._accounts.items():
            if account.started and now - account.settled_at >= SETTLE_INTERVAL_S:
                view = self._view_of(worker)
                if view is not None:
                    account.settle(view, now)
                    self._report_accrued(account)

    def _report_accrued(self, account: _WorkerAccount) -> None:
        if self.on_accrued is not None:
            for attempt in list(account.started):
                self.on_accrued(attempt, account.estimator.seconds_of(attempt) * account.book.gpus)

    def sample(self, now: float) -> None:
        """Close an interval of every worker; write rows where they are due."""
        for worker, account in self._accounts.items():
            view = self._view_of(worker)
            if view is not None:
                account.close_interval(view, now)
        if now >= self._row_due_at:
            self._row_due_at = now + ROW_INTERVAL_S
            self._write_rows()

    def close(self) -> None:
        """Write the rows of the last interval."""
        self.sample(self._clock.now())
        self._write_rows()

    def _write_rows(self) -> None:
        wall = self._clock.wall()
        for worker, account in self._accounts.items():
            for row in account.rows(worker, wall):
                self._record(row)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def seconds_by_kind(self) -> dict[tuple[str, ...], float]:
        """GPU-seconds by worker and kind."""
        books = {worker: account.book for worker, account in self._accounts.items()}
        return {(worker, kind.value): total for worker, book in books.items() for kind, total in book.totals.items()}

    def utilisation(self) -> dict[str, float]:
        """The busy part of the last interval by worker."""
        return {worker: account.book.utilisation for worker, account in self._accounts.items()}

    def _account_of(self, attempt: Attempt) -> _WorkerAccount | None:
        return None if attempt.plan is None else self._accounts.get(attempt.plan.worker)


def _sequences(attempt: Attempt) -> int:
    payload = attempt.job.payload
    return payload.choices if payload.pooled is None else payload.pooled.count
