"""High-water marks of budgets, in the ledger's database: written before the amount they cover is used.

One connection, used by one thread at a time. A commit survives the end of the process; a power failure may lose the
last ones.
"""

from typing import Any

from sqlalchemy import and_, bindparam, delete, select
from sqlalchemy.dialects.sqlite import insert

from inferry.domain.spending import Watermark, WatermarkBatch
from inferry.ledger.schema import watermarks
from inferry.ledger.stores.sqlite_file import SqliteFile

_IDENTITY = ("scope", "tenant", "name", "period", "number")


class SqliteWatermarkStore:
    """Upper bounds of what accounts have used."""

    def __init__(self, url: str) -> None:
        self._file = SqliteFile(url)
        dialect = self._file.engine().dialect
        row = insert(watermarks)
        values = {name: row.excluded[name] for name in ("tokens", "nanos", "at")}
        upsert = row.on_conflict_do_update(index_elements=list(_IDENTITY), set_=values)
        self._upsert = str(upsert.compile(dialect=dialect))
        same = and_(*(watermarks.c[name] == bindparam(name) for name in _IDENTITY))
        self._delete = str(delete(watermarks).where(same).compile(dialect=dialect))

    def read(self) -> list[Watermark]:
        with self._file.engine().connect() as connection:
            return [Watermark(**row) for row in connection.execute(select(watermarks)).mappings()]

    def write(self, batch: WatermarkBatch) -> None:
        """Write all marks or, with an exception, none. Raises LedgerGone."""
        with self._file.engine().begin() as connection:
            if batch.upserts:
                connection.exec_driver_sql(self._upsert, [_row(watermark) for watermark in batch.upserts])
            if batch.deletes:
                connection.exec_driver_sql(
                    self._delete, [_row(watermark)[: len(_IDENTITY)] for watermark in batch.deletes]
                )

    def close(self) -> None:
        self._file.close()


def _row(watermark: Watermark) -> tuple[Any, ...]:
    """The values in the order of the table's columns."""
    return (
        watermark.scope,
        watermark.tenant,
        watermark.name,
        watermark.period,
        watermark.number,
        watermark.tokens,
        watermark.nanos,
        watermark.at,
    )
