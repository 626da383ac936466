"""Writes ledger entries in batches from a thread, so that the event loop never waits for the ledger.

Ownership: the recorder owns its ledger and closes it; no other component calls that ledger. Only the event loop's
thread calls `record`; only the writer thread calls the ledger. The two share a deque and counters with a single writer
each, so the event loop takes no lock. `flush` and `close` block and must not be called on the event loop. `close` ends
the thread.
"""

import logging
import threading
import time
from collections import deque
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry
from inferry.domain.ports import Ledger

log = logging.getLogger(__name__)

INITIAL_RETRY_S = 0.05
MAX_RETRY_S: Final = 5.0
# Raised by a ledger for an entry that it can never store, for example a lone surrogate or a 70-bit number.
UNSTORABLE = (ValueError, TypeError, OverflowError)

Record = LedgerEntry | GpuTimeRow | ComposedRow


class Recorder:
    """Buffers entries until they are written, in their order.

    Failed writes are repeated until they succeed. Meanwhile at most `max_buffered` entries are kept; later ones are
    dropped and counted.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        flush_interval_s: float = 0.1,
        max_batch: int = 1000,
        max_buffered: int = 200_000,
    ) -> None:
        if max_batch < 1 or max_buffered < 1:
            raise ValueError("max_batch and max_buffered must be at least 1")
        self._ledger = ledger
        self._flush_interval_s = flush_interval_s
        self._max_batch = max_batch
        self._max_buffered = max_buffered
        self._buffer: deque[Record] = deque()
        # Written by the event loop only.
        self._accepted = 0
        self._dropped = 0
        # Written by the writer thread only.
        self._written = 0
        self._discarded = 0
        self._settled = 0
        self._wake = threading.Event()
        self._is_woken = False  # whether `_wake` is set, in a field that is read without a call in Python
        self._flush_requested = threading.Event()
        self._closing = threading.Event()
        self._give_up_at: float | None = None
        self._progress = threading.Condition()
        self._writer = threading.Thread(target=self._write_until_closed, name="inferry-ledger", daemon=True)
        self._writer.start()

    @property
    def written(self) -> int:
        """Entries that the ledger has acknowledged."""
        return self._written

    @property
    def dropped(self) -> int:
        """Entries that will never reach the ledger."""
        return self._dropped + self._discarded

    @property
    def accepted(self) -> int:
        """Entries accepted so far."""
        return self._accepted

    @property
    def settled(self) -> int:
        """Accepted entries that are written or dropped."""
        return self._settled

    @property
    def buffered(self) -> int:
        """Accepted entries that are not yet written or dropped."""
        return self._accepted - self._settled

    def ended(self, attempt: Attempt, now: float) -> None:
        """Subscribes to the job events: one entry per attempt."""
        if attempt.ledger_entry is not None and attempt.job.is_recorded:
            self.record(attempt.ledger_entry)

    def record(self, entry: Record) -> None:
        """Accept the entry. Never blocks."""
        buffered = self._accepted - self._settled
        if buffered >= self._max_buffered or self._give_up_at is not None:
            self._drop()
            return
        self._buffer.append(entry)
        self._accepted += 1
        # Append before the check: the writer clears the flag before it reads the buffer, so no entry is missed.
        if not self._is_woken:
            self._is_woken = True
            self._wake.set()
        if buffered + 1 >= self._max_batch and not self._flush_requested.is_set():
            self._flush_requested.set()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all entries recorded before are written or dropped; False after `timeout` seconds."""
        target = self._accepted
        self._flush_requested.set()
        self._wake.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._settled >= target, timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write the remaining entries, then end the thread and close the ledger. Idempotent.

        `record` must not be called after this. Entries that cannot be written within `timeout` seconds are dropped,
        counted and logged.
        """
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + timeout
        self._closing.set()
        self._flush_requested.set()
        self._wake.set()
        # Slightly longer than the writer's own limit, so that the writer can log what was lost.
        self._writer.join(timeout + 1.0)
        if self._writer.is_alive():
            log.error("the ledger does not respond; %d entries were not written", self.buffered)

    def _drop(self) -> None:
        self._dropped += 1
        # Logged once per doubling of the number, to limit the log under load.
        if self._dropped & (self._dropped - 1) == 0:
            reason = "the recorder is closed" if self._closing.is_set() else "its buffer is full"
            log.error("ledger entries dropped so far: %d (%s)", self._dropped, reason)

    # -- the writer thread -------------------------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        try:
            while True:
                self._wake.wait()
                if not self._closing.is_set():
                    self._flush_requested.wait(self._flush_interval_s)
                closing = self._closing.is_set()
                if not closing:
                    self._flush_requested.clear()
                    self._wake.clear()
                    self._is_woken = False
                # What is recorded meanwhile waits for the next interval: few large transactions cost less than many.
                waiting = len(self._buffer)
                while waiting:
                    batch = self._take_batch(waiting)
                    waiting -= len(batch)
                    self._write(batch)
                if closing:
                    return
        finally:
            self._ledger.close()

    def _take_batch(self, waiting: int) -> list[Record]:
        buffer = self._buffer
        return [buffer.popleft() for _ in range(min(waiting, self._max_batch))]

    def _write(self, batch: list[Record]) -> None:
        """Return when every entry of the batch is written or dropped."""
        failures = 0
        while True:
            try:
                self._append(batch)
            except UNSTORABLE as error:
                if len(batch) == 1:
                    log.error("the ledger cannot store an entry of %r: %s", _name(batch[0]), type(error).__name__)
                    self._settle(discarded=1)
                else:
                    for entry in batch:
                        self._write([entry])
                return
            except Exception as error:
                failures += 1
                if not self._wait_to_retry(error, failures, len(batch)):
                    return
            else:
                self._settle(written=len(batch))
                return

    def _append(self, batch: list[Record]) -> None:
        """Append each kind of entry. What was appended before a failure is appended again, without effect."""
        self._ledger.append([entry for entry in batch if isinstance(entry, LedgerEntry)])
        rows = [entry for entry in batch if isinstance(entry, GpuTimeRow)]
        if rows:
            self._ledger.append_gpu_time(rows)
        composed = [entry for entry in batch if isinstance(entry, ComposedRow)]
        if composed:
            self._ledger.append_composed(composed)

    def _wait_to_retry(self, error: Exception, failures: int, size: int) -> bool:
        """Wait before the next try; False where the time for closing is over and the batch is lost."""
        delay_s = min(INITIAL_RETRY_S * 2 ** min(failures - 1, 16), MAX_RETRY_S)
        if self._give_up_at is not None and time.monotonic() + delay_s >= self._give_up_at:
            log.error("ledger write failed while closing, %d entries lost: %s", size, error)
            self._settle(discarded=size)
            return False
        log.error(
            "ledger write failed (try %d, next in %.2f s; %d entries waiting, %d dropped): %s",
            failures,
            delay_s,
            self.buffered,
            self.dropped,
            error,
        )
        # Closing ends the wait early once; after that its own limit applies.
        if self._closing.is_set():
            time.sleep(delay_s)
        else:
            self._closing.wait(delay_s)
        return True

    def _settle(self, *, written: int = 0, discarded: int = 0) -> None:
        with self._progress:
            self._written += written
            self._discarded += discarded
            self._settled += written + discarded
            self._progress.notify_all()


def _name(entry: Record) -> str:
    if isinstance(entry, LedgerEntry):
        return entry.job_id
    return entry.worker if isinstance(entry, GpuTimeRow) else entry.call_id
