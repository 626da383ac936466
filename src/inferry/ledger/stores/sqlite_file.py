"""The ledger in one SQLite file, which may be deleted or replaced while it is open.

In WAL mode with synchronous=NORMAL: readers and the writer do not wait for each other, and a killed process loses no
acknowledged transaction. A power failure may lose the last ones, but never a part of one.

SQLite keeps using the file it has opened: after a replacement rows would be lost, and keys created by other processes
would never be seen. So before every use the opened file is compared with the one at the path.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Engine, Table, cast
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.exc import DataError, IntegrityError

from inferry.domain.ledger import LedgerFileLost, LedgerUnusable
from inferry.ledger.stores.sqlite_open import ledger_path, open_for_writing

_Identity = tuple[int, int]
MAX_ROWS_PER_INSERT = 32
"""Binding the values of a statement holds the GIL, and the event loop waits meanwhile. sqlite3 also releases and takes
the GIL several times per statement, so that fewer rows would cost more CPU time each. A power of two; SQLite allows
32,766 values in a statement."""
PAUSE_S = 0.001
"""Between two statements of a batch: a call that arrives meanwhile waits for the GIL once, and not at every step."""


class SqliteFile:
    """A Connector to the file at the address. `generation` counts the files opened."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._path = ledger_path(url)
        self._generation = 0
        self._engine = open_for_writing(url)
        self.dialect = self._engine.dialect
        self._record_identity()

    @property
    def generation(self) -> int:
        return self._generation

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._current().connect() as connection:
            # sqlite3 itself would not begin a transaction for a SELECT.
            connection.exec_driver_sql("BEGIN")
            yield connection
            connection.rollback()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        with self._current().connect() as connection:
            # Take the write lock first: a read transaction that turns into a write may fail.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.commit()

    @contextmanager
    def appending(self) -> Iterator[Connection]:
        with self._current().begin() as connection:
            yield connection

    def insert(self, table: Table) -> Insert:
        return insert(table)

    def insert_new(self, connection: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> int:
        waiting, inserted, pause_s = iter(rows), 0, 0.0
        try:
            while chunk := list(islice(waiting, MAX_ROWS_PER_INSERT)):
                time.sleep(pause_s)
                pause_s = PAUSE_S
                # In powers of two: a statement for each number of rows would be prepared anew almost every time.
                size, done = MAX_ROWS_PER_INSERT, 0
                while done < len(chunk):
                    if done + size <= len(chunk):
                        values = tuple(chain.from_iterable(chunk[done : done + size]))
                        inserted += connection.exec_driver_sql(_insert_text(table, size), values).rowcount
                        done += size
                    else:
                        size //= 2
        except (IntegrityError, DataError) as error:
            raise ValueError(f"the entry violates a table constraint: {error.orig}") from error
        return inserted

    def floor(self, column: ColumnElement[float]) -> ColumnElement[int]:
        return cast(column, BigInteger)  # truncates; not every build has floor()

    def _current(self) -> Engine:
        """The current database, reopened where the file was replaced. Raises LedgerFileLost."""
        path = self._path
        if path is None:
            return self._engine
        found = _identity(path)
        if found is None:
            raise LedgerFileLost(f"{path.absolute()} was deleted while in use; restore it or restart the gateway")
        if found != self._identity:
            self._reopen(path)
        return self._engine

    def close(self) -> None:
        self._engine.dispose()

    def _reopen(self, path: Path) -> None:
        # The WAL files of the former file do not belong to the new one. They are recognised by their inode, which no
        # other file can have while they are open here.
        for sidecar, identity in self._sidecars.items():
            if identity is not None and _identity(sidecar) == identity:
                sidecar.unlink(missing_ok=True)
        try:
            engine = open_for_writing(self._url)
        except LedgerUnusable as error:
            raise LedgerFileLost(f"{path.absolute()} was replaced while in use: {error}") from None
        self._engine.dispose()
        self._engine = engine
        self._generation += 1
        self._record_identity()

    def _record_identity(self) -> None:
        self._sidecars: dict[Path, _Identity | None] = {}
        self._identity: _Identity | None = None
        if self._path is not None:
            self._identity = _identity(self._path)
            for suffix in ("-wal", "-shm"):
                sidecar = self._path.with_name(self._path.name + suffix)
                self._sidecars[sidecar] = _identity(sidecar)


def _identity(path: Path) -> _Identity | None:
    """The file's identity; None where it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@lru_cache
def _insert_text(table: Table, rows: int) -> str:
    # Compiled once and run with plain values: time in Python holds the GIL and delays the event loop.
    one = str(insert(table).compile())
    statement, values = one.split(" VALUES ")
    return f"{statement} VALUES {', '.join([values] * rows)} ON CONFLICT DO NOTHING"
