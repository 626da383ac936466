"""Counts of stored work and bytes of stored content, for metrics. Methods block.

Only queries that an index answers, or that read tables with few rows: the number of open jobs and callbacks is bounded,
the number of ended ones is not.
"""

from sqlalchemy import Connection, Table, func, select

from inferry.domain.storage import UNFINISHED, Database, StorageStatistics
from inferry.ledger.storage_schema import async_jobs, batches, files

_SIZES = {
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()",
    "postgresql": "SELECT pg_database_size(current_database())",
}


class StorageStatisticsStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> StorageStatistics:
        with self._database.reading() as connection:
            open_batches = select(func.count()).where(batches.c.status.in_(UNFINISHED))
            open_jobs = select(func.count()).where(async_jobs.c.status == "in_progress")
            open_callbacks = select(func.count()).where(async_jobs.c.callback == "pending")
            return StorageStatistics(
                open_batches=connection.execute(open_batches).scalar_one(),
                open_async_jobs=connection.execute(open_jobs).scalar_one(),
                open_callbacks=connection.execute(open_callbacks).scalar_one(),
                file_bytes=_bytes(connection, files),
                batch_bytes=_bytes(connection, batches),
                async_job_bytes=_bytes(connection, async_jobs),
                database_bytes=connection.exec_driver_sql(_SIZES[connection.dialect.name]).scalar_one(),
            )


def _bytes(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.coalesce(func.sum(table.c.size), 0))).scalar_one())
