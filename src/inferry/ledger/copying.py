"""Copies a ledger into an empty one, also of another database system."""

from contextlib import ExitStack, closing

from sqlalchemy import Connection, func, select

from inferry.domain.ledger import LedgerUnusable
from inferry.domain.ledger_urls import shown_ledger_url
from inferry.ledger.storage_schema import metadata
from inferry.ledger.stores.opening import connect, exclusive_use, require_existing, require_shared

ROWS_PER_INSERT = 500


def copy_ledger(source: str, target: str) -> dict[str, int]:
    """Copy all rows, or none; returns their number by table. No gateway may use either. Raises LedgerUnusable."""
    require_existing(source)
    require_shared(target)
    with ExitStack() as stack:
        for url in (source, target):
            stack.enter_context(exclusive_use(url))
        reader = stack.enter_context(closing(connect(source, exclusive=True)))
        writer = stack.enter_context(closing(connect(target, exclusive=True)))
        with reader.reading() as rows, writer.writing() as connection:
            _require_empty(connection, shown_ledger_url(target))
            return {table.name: _copy(rows, connection, table.name) for table in metadata.sorted_tables}


def _require_empty(connection: Connection, name: str) -> None:
    for table in metadata.sorted_tables:
        if connection.execute(select(func.count()).select_from(table)).scalar():
            raise LedgerUnusable(f"{name} has rows already: copy into an empty database")


def _copy(source: Connection, target: Connection, name: str) -> int:
    table, count = metadata.tables[name], 0
    for rows in source.execute(select(table).execution_options(yield_per=ROWS_PER_INSERT)).mappings().partitions():
        target.execute(table.insert(), [dict(row) for row in rows])
        count += len(rows)
    return count
