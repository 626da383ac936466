"""The ledger's database as the stores of documents, files and batches use it.

These stores are written in SQLAlchemy Core alone; what SQLite needs beyond that is here.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from inferry.domain.errors import LedgerUnavailable
from inferry.domain.ledger import LedgerFileLost
from inferry.ledger.stores.sqlite_file import SqliteFile

RETRY_AFTER_S = 2.0


class SqliteDatabase:
    """One connection behind a lock. Methods may be called from any thread, and block. Raises LedgerUnavailable."""

    def __init__(self, url: str) -> None:
        self._file = SqliteFile(url)
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent view of the data."""
        with self._lock, _as_client_errors(), self._file.engine().connect() as connection:
            # sqlite3 itself would not begin a transaction for a SELECT.
            connection.exec_driver_sql("BEGIN")
            yield connection
            connection.rollback()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction: all of it is written or, after an exception, nothing."""
        with self._lock, _as_client_errors(), self._file.engine().connect() as connection:
            # Take the write lock first: a read transaction that turns into a write may fail.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.commit()

    def close(self) -> None:
        with self._lock:
            self._file.close()


@contextmanager
def _as_client_errors() -> Iterator[None]:
    try:
        yield
    except LedgerFileLost:
        raise LedgerUnavailable("the gateway's database is unavailable", retry_after_s=RETRY_AFTER_S) from None
    except DBAPIError as error:
        # Its own text may quote a statement; the parameters are hidden by the engine.
        name = type(error.orig).__name__
        raise LedgerUnavailable(f"the gateway's database failed ({name})", retry_after_s=RETRY_AFTER_S) from error
