"""Opens the ledger's database, SQLite or PostgreSQL by its URL."""

from collections.abc import Iterator
from contextlib import contextmanager

from inferry.domain.ledger import LedgerUnusable
from inferry.domain.ledger_urls import IN_MEMORY, IN_MEMORY_MESSAGE, is_postgresql
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.stores import file_lock, postgres, sqlite_open
from inferry.ledger.stores.connector import Connector
from inferry.ledger.stores.sqlite_file import SqliteFile


def connect(url: str, *, exclusive: bool = False, shared: bool = False) -> Connector:
    """The database with all tables, created or migrated where needed. Raises LedgerUnusable.

    `exclusive`: lock a PostgreSQL database against other gateways while connected. `exclusive_use` locks SQLite files.
    `shared`: lock it against gateways that want it for themselves.
    """
    return postgres.PostgresServer(url, exclusive=exclusive, shared=shared) if is_postgresql(url) else SqliteFile(url)


def open_queries(url: str) -> LedgerQueries:
    """Queries of an existing ledger, also while a gateway writes to it. Creates and changes nothing."""
    opened = postgres.open_for_reading(url) if is_postgresql(url) else sqlite_open.open_for_reading(url)
    return LedgerQueries(opened)


def require_shared(url: str) -> None:
    """Raises LedgerUnusable for a ledger that only its own process can open."""
    if url == IN_MEMORY:
        raise LedgerUnusable(IN_MEMORY_MESSAGE)
    if not is_postgresql(url):
        sqlite_open.require_file(url)


def require_existing(url: str) -> None:
    """Raises LedgerMissing where opening it would create one."""
    if is_postgresql(url):
        postgres.open_for_reading(url).dispose()
    else:
        sqlite_open.require_existing(url)


@contextmanager
def exclusive_use(url: str) -> Iterator[None]:
    """Lock a SQLite file for one gateway. In PostgreSQL the connection that writes watermarks holds the lock."""
    if is_postgresql(url):
        yield
        return
    with file_lock.exclusive_use(url):
        yield
