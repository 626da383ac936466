"""Makes what stores content. Part of the composition root."""

from typing import NamedTuple

from inferry.domain.clock import Clock
from inferry.domain.storage import StorageLimits
from inferry.durable.documents import Documents
from inferry.durable.executor import StoreExecutor
from inferry.durable.files import Files
from inferry.durable.sweeper import Sweeper
from inferry.ledger.stores.documents import DocumentStore
from inferry.ledger.stores.files import FileStore
from inferry.ledger.stores.sqlite_database import SqliteDatabase


class Storage(NamedTuple):
    """Stored content and what works on it."""

    limits: StorageLimits
    database: SqliteDatabase
    executor: StoreExecutor
    documents: Documents
    files: Files
    sweeper: Sweeper

    def start(self) -> None:
        self.sweeper.start()

    async def close(self) -> None:
        await self.sweeper.close()
        await self.executor.close()
        self.database.close()


def make_storage(ledger: str, limits: StorageLimits, clock: Clock) -> Storage:
    """The stored content in the ledger's database. Nothing is started."""
    database = SqliteDatabase(ledger)
    executor = StoreExecutor()
    documents, files = DocumentStore(database), FileStore(database)
    files.discard_uploads()
    return Storage(
        limits,
        database,
        executor,
        Documents(documents, executor, clock),
        Files(files, executor, limits, clock),
        Sweeper([documents.sweep, files.sweep], executor, clock),
    )
