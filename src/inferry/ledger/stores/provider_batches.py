"""Batches of hosted providers, and which items they execute. Methods block."""

from collections.abc import Sequence

from sqlalchemy import delete, insert, select, update

from inferry.domain.provider_batches import AssignedItem, ProviderBatch
from inferry.domain.storage import BatchItem, Database
from inferry.ledger.storage_schema import batch_items, provider_batches

RETURNED = ""
"""The provider batch of an item that the gateway executes after a provider did not."""

_COLUMNS = [provider_batches.c[name] for name in ProviderBatch.__struct_fields__]
_IN = 500


class ProviderBatchStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def unassigned(self, batch_id: str, after: int, limit: int) -> list[BatchItem]:
        """The next items without an outcome that were never tried and never assigned."""
        c = batch_items.c
        query = select(c.number, c.custom_id, c.body).where(
            c.batch_id == batch_id,
            c.outcome.is_(None),
            c.provider_batch.is_(None),
            c.tries == 0,
            c.number > after,
        )
        with self._database.reading() as connection:
            return [BatchItem(*row) for row in connection.execute(query.order_by(c.number).limit(limit))]

    def assign(self, batch: ProviderBatch, numbers: Sequence[int]) -> None:
        """Store a batch with its items, in one transaction."""
        with self._database.writing() as connection:
            values = {name: getattr(batch, name) for name in ProviderBatch.__struct_fields__}
            connection.execute(insert(provider_batches).values(**values))
            for start in range(0, len(numbers), _IN):
                part = list(numbers[start : start + _IN])
                is_item = (batch_items.c.batch_id == batch.batch_id) & batch_items.c.number.in_(part)
                connection.execute(update(batch_items).where(is_item).values(provider_batch=batch.id))

    def of_batch(self, batch_id: str) -> list[ProviderBatch]:
        """Those whose results are not stored yet."""
        query = select(*_COLUMNS).where(provider_batches.c.batch_id == batch_id).order_by(provider_batches.c.id)
        with self._database.reading() as connection:
            return [ProviderBatch(**row) for row in connection.execute(query).mappings()]

    def begin(self, id: str) -> None:
        """A submission begins: from here on the provider may have the batch."""
        self._update(id, is_begun=True)

    def submitted(self, id: str, provider_id: str) -> None:
        self._update(id, provider_id=provider_id)

    def items(self, batch: ProviderBatch, *, with_bodies: bool) -> list[AssignedItem]:
        """The items without an outcome that the batch executes."""
        c = batch_items.c
        columns = [c.number, c.custom_id, c.tries, *([c.body] if with_bodies else [])]
        is_item = (c.batch_id == batch.batch_id) & (c.provider_batch == batch.id) & c.outcome.is_(None)
        with self._database.reading() as connection:
            return [AssignedItem(*row) for row in connection.execute(select(*columns).where(is_item))]

    def end(self, batch: ProviderBatch, returned: Sequence[int]) -> None:
        """The batch's results are stored. The gateway executes the items with these numbers itself."""
        with self._database.writing() as connection:
            for start in range(0, len(returned), _IN):
                part = list(returned[start : start + _IN])
                is_item = (batch_items.c.batch_id == batch.batch_id) & batch_items.c.number.in_(part)
                connection.execute(update(batch_items).where(is_item).values(provider_batch=RETURNED))
            connection.execute(delete(provider_batches).where(provider_batches.c.id == batch.id))

    def _update(self, id: str, **values: object) -> None:
        with self._database.writing() as connection:
            connection.execute(update(provider_batches).where(provider_batches.c.id == id).values(**values))
