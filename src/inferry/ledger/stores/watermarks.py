"""High-water marks of budgets, in the ledger's database: written before the amount they cover is used.

One connection, used by one thread at a time. A commit survives the end of the process; a power failure may lose the
last ones.
"""

from msgspec.structs import asdict
from sqlalchemy import and_, bindparam, delete, select

from inferry.domain.spending import Watermark, WatermarkBatch
from inferry.ledger.schema import watermarks
from inferry.ledger.stores.opening import connect

_IDENTITY = ("scope", "tenant", "name", "period", "number")
_DELETE = delete(watermarks).where(and_(*(watermarks.c[name] == bindparam(f"old_{name}") for name in _IDENTITY)))


class WatermarkStore:
    """Upper bounds of what accounts have used.

    `exclusive`: in PostgreSQL the connection locks the database against other gateways, so that no watermark is written
    by a gateway that has lost its lock. Raises LedgerLocked where another gateway has it.
    """

    def __init__(self, url: str, *, exclusive: bool = False) -> None:
        self._connector = connect(url, exclusive=exclusive)
        row = self._connector.insert(watermarks)
        values = {name: row.excluded[name] for name in ("tokens", "nanos", "at")}
        self._upsert = row.on_conflict_do_update(index_elements=list(_IDENTITY), set_=values)

    def read(self) -> list[Watermark]:
        with self._connector.reading() as connection:
            return [Watermark(**row) for row in connection.execute(select(watermarks)).mappings()]

    def write(self, batch: WatermarkBatch) -> None:
        """Write all marks or, with an exception, none. Raises LedgerFileLost."""
        with self._connector.appending() as connection:
            if batch.upserts:
                connection.execute(self._upsert, [asdict(watermark) for watermark in batch.upserts])
            if batch.deletes:
                names = [{f"old_{name}": getattr(one, name) for name in _IDENTITY} for one in batch.deletes]
                connection.execute(_DELETE, names)

    def close(self) -> None:
        self._connector.close()
