"""High-water marks of budgets, in the ledger's database: written before what they cover is used.

One connection, used by one thread at a time. A commit survives the end of the process; a power cut may lose the last.
"""

from typing import Any

from sqlalchemy import and_, bindparam, delete, select
from sqlalchemy.dialects.sqlite import insert

from inferry.adapters.ledgers.files import OpenedFile
from inferry.adapters.ledgers.schema import marks
from inferry.domain.spending import Mark, MarkBatch

_IDENTITY = ("scope", "tenant", "name", "period", "number")


class SqliteMarks:
    """What accounts may have used at most."""

    def __init__(self, url: str) -> None:
        self._file = OpenedFile(url)
        dialect = self._file.engine().dialect
        row = insert(marks)
        values = {name: row.excluded[name] for name in ("tokens", "nanos", "at")}
        upsert = row.on_conflict_do_update(index_elements=list(_IDENTITY), set_=values)
        self._upsert = str(upsert.compile(dialect=dialect))
        same = and_(*(marks.c[name] == bindparam(name) for name in _IDENTITY))
        self._delete = str(delete(marks).where(same).compile(dialect=dialect))

    def read(self) -> list[Mark]:
        with self._file.engine().connect() as connection:
            return [Mark(**row) for row in connection.execute(select(marks)).mappings()]

    def write(self, batch: MarkBatch) -> None:
        """All of it or, with an exception, nothing. Raises LedgerGone."""
        with self._file.engine().begin() as connection:
            if batch.kept:
                connection.exec_driver_sql(self._upsert, [_row(mark) for mark in batch.kept])
            if batch.gone:
                connection.exec_driver_sql(self._delete, [_row(mark)[: len(_IDENTITY)] for mark in batch.gone])

    def close(self) -> None:
        self._file.close()


def _row(mark: Mark) -> tuple[Any, ...]:
    """In the order of the table's columns."""
    return (mark.scope, mark.tenant, mark.name, mark.period, mark.number, mark.tokens, mark.nanos, mark.at)
