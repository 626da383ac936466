"""The ledger in a PostgreSQL database.

Every store has one connection, opened again when it was lost. Locks are advisory locks of the database and the current
schema. Messages never contain the URL's password.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Table,
    cast,
    create_engine,
    event,
    func,
    inspect,
    text,
)
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, OperationalError

from inferry.domain.ledger import LedgerLocked, LedgerUnusable
from inferry.domain.ledger_urls import ledger_url_error, shown_ledger_url
from inferry.ledger.migrations import check_readable, check_version, migrate
from inferry.ledger.schema import SCHEMA_VERSION
from inferry.ledger.storage_schema import metadata

CONNECTION_PARAMETERS = {
    "application_name": "inferry",
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
"""libpq parameters that a URL may override: a server that is gone is noticed within some ten seconds."""
_SERVER_SETTINGS = "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3 -c jit=off"
"""The server releases the lock of a gateway whose host is gone. Compiling these queries takes longer than they do."""
LOCK_WAIT_S = 5.0
"""Longest wait for the server to notice that a gateway was killed."""

ROWS_PER_TURN = 16
TURN_PAUSE_S = 0.00005
"""Each row of a COPY takes some 7 µs in Python. After so many rows the thread sleeps, so that an event loop that waits
for the GIL gets it sooner than after the interpreter's switch interval."""

_WRITE_LOCK, _GATEWAY_LOCK = 1_227_777_601, 1_227_777_602
_LOCK_WRITERS = text(f"SELECT pg_advisory_xact_lock({_WRITE_LOCK}, hashtext(current_schema()))")
_TRY_LOCK_GATEWAY = f"SELECT pg_try_advisory_lock({_GATEWAY_LOCK}, hashtext(current_schema()))"
_TRY_SHARE_GATEWAY = f"SELECT pg_try_advisory_lock_shared({_GATEWAY_LOCK}, hashtext(current_schema()))"
_CREATE_VERSION = text("CREATE TABLE IF NOT EXISTS inferry_schema (version INTEGER NOT NULL)")
_SELECT_VERSION = text("SELECT version FROM inferry_schema")


class PostgresServer:
    """A Connector to a PostgreSQL database. Creates or migrates the tables. Raises LedgerUnusable."""

    def __init__(self, url: str, *, exclusive: bool = False, shared: bool = False) -> None:
        self._name = shown_ledger_url(url)
        with _as_unusable(self._name, DBAPIError):
            opened = _engine(url)
            try:
                _prepare(opened, self._name)
            except BaseException:
                opened.dispose()
                raise
        self._engine = opened
        self.dialect = self._engine.dialect
        if exclusive or shared:
            self._lock_gateways(_TRY_LOCK_GATEWAY if exclusive else _TRY_SHARE_GATEWAY)

    @property
    def generation(self) -> int:
        return 0

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with _as_unusable(self._name), self._engine.connect() as connection:
            yield connection.execution_options(isolation_level="REPEATABLE READ")
            connection.rollback()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        with _as_unusable(self._name), self._engine.begin() as connection:
            connection.execute(_LOCK_WRITERS)
            yield connection

    @contextmanager
    def appending(self) -> Iterator[Connection]:
        with _as_unusable(self._name), self._engine.begin() as connection:
            yield connection

    def insert(self, table: Table) -> Insert:
        return insert(table)

    def insert_new(self, connection: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> int:
        # COPY takes a tenth of the time that an INSERT per row takes in Python, which holds the GIL. It knows no ON
        # CONFLICT, hence the temporary table.
        raw = connection.connection.cursor()
        driver: Any = self.dialect.loaded_dbapi
        incoming = f"incoming_{table.name}"
        try:
            raw.execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS {incoming} (LIKE {table.name}) ON COMMIT DELETE ROWS")
            # Columns by name: those that were added by an upgrade come last, whatever their place in the table is here.
            columns = ", ".join(column.name for column in table.columns)
            with raw.copy(f"COPY {incoming} ({columns}) FROM STDIN") as copy:
                for row in _in_turns(rows):
                    copy.write_row(row)
            raw.execute(f"INSERT INTO {table.name} SELECT * FROM {incoming} ON CONFLICT DO NOTHING")  # noqa: S608
            return int(raw.rowcount)
        except (driver.DataError, driver.IntegrityError) as error:
            raise ValueError(f"the entry violates a table constraint: {type(error).__name__}") from None
        except driver.OperationalError as error:
            raise LedgerUnusable(_message(self._name, error)) from None
        finally:
            raw.close()

    def floor(self, column: ColumnElement[float]) -> ColumnElement[int]:
        return cast(func.floor(column), BigInteger)

    def close(self) -> None:
        self._engine.dispose()

    def _lock_gateways(self, statement: str) -> None:
        """Lock the database with this connection and with every later one that replaces it."""

        @event.listens_for(self._engine, "connect")
        def lock(connection, _record) -> None:  # type: ignore[no-untyped-def]
            cursor = connection.cursor()
            is_free = cursor.execute(statement).fetchone()[0]
            cursor.close()
            connection.commit()  # a lock of the session stays
            if not is_free:
                connection.close()
                raise LedgerLocked(
                    f"another gateway already uses this ledger ({self._name}); two gateways on one database would "
                    "each grant every budget in full; stop the other one, configure another ledger, or let both share "
                    "their limits (`cluster.redis`)"
                )

        self._engine.dispose()  # so that the next use connects again
        give_up_at = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                with _as_unusable(self._name), self._engine.connect():
                    return
            except LedgerLocked:
                if time.monotonic() >= give_up_at:
                    self._engine.dispose()
                    raise
                time.sleep(0.1)


def _in_turns(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The rows, with a pause between turns of ROWS_PER_TURN rows."""
    for number, row in enumerate(rows):
        if number and number % ROWS_PER_TURN == 0:
            time.sleep(TURN_PAUSE_S)
        yield row


def open_for_reading(url: str) -> Engine:
    """An existing ledger, also while a gateway writes to it. Creates and changes nothing."""
    name = shown_ledger_url(url)
    with _as_unusable(name, DBAPIError):
        engine = _engine(url, "-c default_transaction_read_only=on")
        try:
            with engine.connect() as connection:
                check_readable(_version(connection), name)
        except BaseException:
            engine.dispose()
            raise
    return engine


def _engine(url: str, options: str = "") -> Engine:
    if (problem := ledger_url_error(url)) is not None:
        raise LedgerUnusable(f"the ledger's address {problem}")
    parsed = make_url(url).set(drivername="postgresql+psycopg")
    given = {name: value for name, value in CONNECTION_PARAMETERS.items() if name not in parsed.query}
    wanted = f"{parsed.query.get('options', '')} {_SERVER_SETTINGS} {options}".strip()
    try:
        return create_engine(
            parsed,
            # One connection, used by one thread at a time. A ping before each use replaces one that was lost.
            pool_size=1,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={**given, "options": wanted},
            hide_parameters=True,
        )
    except ModuleNotFoundError:
        raise LedgerUnusable("PostgreSQL needs an extra package: pip install 'inferry[postgres]'") from None


def _prepare(engine: Engine, name: str) -> None:
    """Create or migrate the tables where needed. A role that may not create tables can use a current schema."""
    with engine.begin() as connection:
        if check_version(_version(connection), name) == SCHEMA_VERSION:
            return
    with engine.begin() as connection:
        connection.execute(_LOCK_WRITERS)
        version = check_version(_version(connection), name)
        if version == SCHEMA_VERSION:
            return
        if version == 0 and (taken := set(metadata.tables) & set(inspect(connection).get_table_names())):
            raise LedgerUnusable(
                f"the database {name} has tables that are not a ledger's ({', '.join(sorted(taken))}); use a database "
                "or schema of its own"
            )
        migrate(connection, version)
        connection.execute(_CREATE_VERSION)
        connection.execute(text("DELETE FROM inferry_schema"))
        connection.execute(text("INSERT INTO inferry_schema VALUES (:version)"), {"version": SCHEMA_VERSION})


def _version(connection: Connection) -> int:
    """The schema version, 0 where there is no ledger."""
    # Not with to_regclass, which reads a cache that may be older than the lock.
    if "inferry_schema" not in inspect(connection).get_table_names():
        return 0
    return int(connection.execute(_SELECT_VERSION).scalar() or 0)


@contextmanager
def _as_unusable(name: str, kind: type[DBAPIError] = OperationalError) -> Iterator[None]:
    """OperationalError: the server does not answer, or refuses the connection."""
    try:
        yield
    except kind as error:
        raise LedgerUnusable(_message(name, error.orig)) from None


def _message(name: str, error: BaseException | None) -> str:
    return f"cannot use the ledger {name}: {' '.join(str(error).split())}"
