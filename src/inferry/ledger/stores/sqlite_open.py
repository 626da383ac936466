"""Opens a SQLite ledger: for writing, with migration, or for reading."""

import sqlite3
from pathlib import Path

from sqlalchemy import Connection, Engine, StaticPool, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from inferry.domain.ledger import LedgerMissing, LedgerUnusable
from inferry.domain.ledger_urls import IN_MEMORY_MESSAGE, ledger_url_error
from inferry.ledger.migrations import check_readable, check_version, migrate
from inferry.ledger.schema import SCHEMA_VERSION

BUSY_TIMEOUT_MS = 5000

# Without an adapter, sqlite3 raises and catches an AttributeError for every None and bool that it binds: with the GIL
# held, and at three times the cost. A row of the ledger has about eight of them.
sqlite3.register_adapter(type(None), {}.get)  # type: ignore[arg-type]
sqlite3.register_adapter(bool, int)


def open_for_writing(url: str) -> Engine:
    """The database with all tables, created or migrated where needed. Raises LedgerUnusable."""
    parsed = _parse(url)
    if (path := _file(parsed)) is not None and not path.absolute().parent.is_dir():
        raise LedgerUnusable(f"the directory of the ledger does not exist: {path.absolute().parent}")
    engine = _engine(parsed)
    try:
        with engine.connect() as connection:
            # For a new file. Rows are written many at a time: fewer pages are fewer writes.
            connection.exec_driver_sql("PRAGMA page_size = 16384")
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            connection.exec_driver_sql("PRAGMA synchronous = NORMAL")
            # Take the write lock before the check, so that two processes do not both create the tables.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            version = _version(connection, parsed)
            if version < SCHEMA_VERSION:
                migrate(connection, version)
                connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.commit()
    except DBAPIError as error:
        engine.dispose()
        raise LedgerUnusable(f"cannot open the ledger {parsed.database}: {error.orig}") from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def require_file(url: str) -> Path:
    """The ledger's file, which may not exist yet. Raises LedgerUnusable for one in memory."""
    path = _file(_parse(url))
    if path is None:
        raise LedgerUnusable(IN_MEMORY_MESSAGE)
    return path


def require_existing(url: str) -> None:
    """Raises LedgerMissing where opening it would create a file."""
    path = require_file(url)
    if not path.is_file():
        raise LedgerMissing(f"no ledger at {path.absolute()}")


def open_for_reading(url: str) -> Engine:
    """An existing ledger, also while a gateway writes to it. Creates and changes nothing."""
    parsed = _parse(url)
    path = _file(parsed)
    if path is None:
        raise LedgerMissing(IN_MEMORY_MESSAGE)
    if not path.is_file():
        raise LedgerMissing(f"no ledger at {path.absolute()}")
    engine = _engine(parsed)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA query_only = ON")
            check_readable(_version(connection, parsed), str(path))
    except DBAPIError as error:
        engine.dispose()
        raise LedgerUnusable(f"cannot read the ledger {path}: {error.orig}") from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def _parse(url: str) -> URL:
    if (problem := ledger_url_error(url)) is not None:
        raise LedgerUnusable(f"the ledger's address {problem}")
    return make_url(url)


def ledger_path(url: str) -> Path | None:
    """The file of a ledger; None for one in memory."""
    return _file(_parse(url))


def _file(url: URL) -> Path | None:
    return None if url.database in (None, "", ":memory:") else Path(str(url.database))


def _engine(url: URL) -> Engine:
    # One connection, used by one thread at a time, not always the one that opened it. Parameters are kept out of error
    # messages.
    engine = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False}, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def set_up(connection, _record) -> None:  # type: ignore[no-untyped-def]
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        # An INSERT of many rows keeps a journal of its own in case it fails halfway: in memory, not in a new file each.
        connection.execute("PRAGMA temp_store = MEMORY")

    return engine


def _version(connection: Connection, url: URL) -> int:
    """The schema version of the file, 0 for an empty one. Raises LedgerUnusable for unknown versions."""
    found = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    version = check_version(found, str(url.database))
    if version == 0 and connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one():
        raise LedgerUnusable(f"{url.database} is a SQLite database, but not a ledger")
    return version
