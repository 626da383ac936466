"""What a database system must provide for the ledger. All else is SQLAlchemy Core."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Connection, Table


class Connector(Protocol):
    """One connection to the ledger's database, used by one thread at a time. Methods block."""

    @property
    def generation(self) -> int:
        """Changes when the database was replaced by another: everything read before is outdated."""

    @property
    def dialect(self) -> Any:
        """The SQLAlchemy dialect."""

    def reading(self) -> AbstractContextManager[Connection]:
        """A consistent view of the data."""

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction that no other `writing` transaction of any process runs beside."""

    def appending(self) -> AbstractContextManager[Connection]:
        """A transaction whose statements need no protection from other writers."""

    def insert(self, table: Table) -> Any:
        """The dialect's INSERT, which has `on_conflict_do_update`."""

    def insert_new(self, connection: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> int:
        """Insert the rows whose primary key is new; returns how many. Values are in the order of the table's columns.

        Raises ValueError or OverflowError for a value that can never be stored.
        """

    def floor(self, column: ColumnElement[float]) -> ColumnElement[int]:
        """The integer below a positive number."""

    def close(self) -> None: ...
