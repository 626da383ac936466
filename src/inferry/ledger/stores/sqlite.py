"""The ledger in one SQLite file.

In WAL mode with synchronous=NORMAL: readers and the writer do not wait for each other, and a killed process loses no
acknowledged batch. A power failure may lose the last batches, but never a part of one.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict, astuple
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DataError, IntegrityError

from inferry.domain.ledger import GpuTimeRow, LedgerEntry
from inferry.ledger.schema import attempts, gpu_time
from inferry.ledger.stores.sqlite_file import SqliteFile
from inferry.ledger.stores.sqlite_open import (
    LedgerMissing,
    LedgerUnusable,
    open_sqlite_queries,
    require_existing,
    require_file,
)

__all__ = [
    "LedgerMissing",
    "LedgerUnusable",
    "SqliteLedger",
    "open_sqlite_queries",
    "require_existing",
    "require_file",
]


class SqliteLedger:
    """One row per attempt; appending the same (job_id, attempt) again changes nothing.

    Holds one connection. One process writes, any number may read. While the file is deleted, appends fail; after it was
    replaced, rows go to the new file.
    """

    def __init__(self, url: str) -> None:
        self._file = SqliteFile(url)
        # Compiled once and run with plain rows: time in Python holds the GIL and delays the event loop.
        inserting = insert(attempts).on_conflict_do_nothing(index_elements=["job_id", "attempt"])
        self._insert = str(inserting.compile(dialect=self._file.engine().dialect))

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """Write all entries or, with an exception, none. ValueError or OverflowError: an entry can never be stored;
        LedgerGone: the file is missing."""
        if not entries:
            return
        try:
            with self._file.engine().begin() as connection:
                connection.exec_driver_sql(self._insert, [_row(entry) for entry in entries])
        except (IntegrityError, DataError) as error:
            raise ValueError(f"the entry violates a table constraint: {error.orig}") from error

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None:
        inserting = insert(gpu_time).on_conflict_do_nothing(index_elements=["worker", "started_at", "kind"])
        try:
            with self._file.engine().begin() as connection:
                connection.execute(inserting, [asdict(row) for row in rows])
        except (IntegrityError, DataError) as error:
            raise ValueError(f"the row violates a table constraint: {error.orig}") from error

    def close(self) -> None:
        self._file.close()


_OUTCOME = LedgerEntry.__struct_fields__.index("outcome")


def _row(entry: LedgerEntry) -> tuple[Any, ...]:
    """The entry's fields in the order of the table's columns."""
    values = astuple(entry)  # less time in Python than by name
    return (*values[:_OUTCOME], entry.outcome.value, *values[_OUTCOME + 1 :])
