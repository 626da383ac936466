"""Attempts in the ledger's database."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import astuple, replace
from sqlalchemy import Connection, func, select

from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry, Outcome
from inferry.ledger.schema import attempts, composed_calls, gpu_time
from inferry.ledger.stores.charges import charged_jobs
from inferry.ledger.stores.opening import connect


class AttemptStore:
    """One row per attempt; appending the same (job_id, attempt) again changes nothing.

    A job has one successful attempt. Stored work that another process repeats begins at attempt 1 again: its success
    gets the next free number where that of an attempt which failed or was cancelled is taken, and is left out where the
    first process has written one.

    Holds one connection. One process writes, any number may read. While the database is away, appends fail; after a
    SQLite file was replaced, rows go to the new file.
    """

    def __init__(self, url: str) -> None:
        self._connector = connect(url)

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """Write all entries or, with an exception, none. ValueError or OverflowError: an entry can never be stored."""
        if not entries:
            return
        with self._connector.appending() as connection:
            later = [entry for entry in entries if entry.attempt > 1 and entry.outcome is Outcome.DONE]
            if later and (known := charged_jobs(connection, {entry.job_id for entry in later})):
                entries = [one for one in entries if one.attempt == 1 or one.job_id not in known]
            if self._connector.insert_new(connection, attempts, map(_row, entries)) < len(entries):
                self._insert_results(connection, entries)

    def _insert_results(self, connection: Connection, entries: Sequence[LedgerEntry]) -> None:
        """Insert the successes whose number was taken by an attempt without one."""
        done = {entry.job_id: entry for entry in entries if entry.outcome is Outcome.DONE}
        if not done:
            return
        query = select(attempts.c.job_id, func.max(attempts.c.attempt)).where(attempts.c.job_id.in_(list(done)))
        last = {row[0]: row[1] for row in connection.execute(query.group_by(attempts.c.job_id))}
        missing = done.keys() - charged_jobs(connection, done)
        rows = [_row(replace(done[job_id], attempt=last[job_id] + 1)) for job_id in sorted(missing)]
        self._connector.insert_new(connection, attempts, rows)

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None:
        """Write all rows or, with an exception, none."""
        if rows:
            with self._connector.appending() as connection:
                self._connector.insert_new(connection, gpu_time, [astuple(row) for row in rows])

    def append_composed(self, rows: Sequence[ComposedRow]) -> None:
        """Write all rows or, with an exception, none."""
        if rows:
            with self._connector.appending() as connection:
                self._connector.insert_new(connection, composed_calls, [astuple(row) for row in rows])

    def close(self) -> None:
        self._connector.close()


_OUTCOME = LedgerEntry.__struct_fields__.index("outcome")


def _row(entry: LedgerEntry) -> tuple[Any, ...]:
    """The entry's fields in the order of the table's columns."""
    if entry.ended_at != entry.ended_at:
        raise ValueError("the time of the end is not a number")
    values = astuple(entry)  # less time in Python than by name
    return (*values[:_OUTCOME], entry.outcome._value_, *values[_OUTCOME + 1 :])
