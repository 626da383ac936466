"""The ledger in one SQLite file.

In WAL mode with synchronous=NORMAL: readers and the writer do not wait for each other, and a killed process loses no
batch that was acknowledged. A power cut may lose the last ones, never half of one.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import astuple
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DataError, IntegrityError

from inferry.domain.ledger import LedgerEntry
from inferry.ledger.schema import attempts
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

    Holds one connection. One process writes, any number may read. Where the file is deleted, nothing is appended until
    one is there again; where it is replaced, rows go to the one that is there.
    """

    def __init__(self, url: str) -> None:
        self._file = SqliteFile(url)
        # Compiled once and run with plain rows: a writer that is busy in Python keeps the event loop waiting.
        inserting = insert(attempts).on_conflict_do_nothing(index_elements=["job_id", "attempt"])
        self._insert = str(inserting.compile(dialect=self._file.engine().dialect))

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """Write all of them or, with an exception, none. ValueError or OverflowError: one of them can never be held;
        LedgerGone: there is no file to write to."""
        if not entries:
            return
        try:
            with self._file.engine().begin() as connection:
                connection.exec_driver_sql(self._insert, [_row(entry) for entry in entries])
        except (IntegrityError, DataError) as error:
            raise ValueError(f"the entry violates a table constraint: {error.orig}") from error

    def close(self) -> None:
        self._file.close()


_OUTCOME = LedgerEntry.__struct_fields__.index("outcome")


def _row(entry: LedgerEntry) -> tuple[Any, ...]:
    """The entry's fields, which are the table's columns in the same order."""
    values = astuple(entry)  # a writer that is busy in Python keeps the event loop waiting
    return (*values[:_OUTCOME], entry.outcome.value, *values[_OUTCOME + 1 :])
