"""Attempts in the ledger's database."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import astuple

from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry
from inferry.ledger.schema import attempts, composed_calls, gpu_time
from inferry.ledger.stores.opening import connect


class AttemptStore:
    """One row per attempt; appending the same (job_id, attempt) again changes nothing.

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
            self._connector.insert_new(connection, attempts, map(_row, entries))

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
