"""A connection on which all statements together take a bounded time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from inferry.domain.errors import ReportTimeout

_CHECK_EVERY = 20_000
"""Instructions of SQLite's virtual machine between two looks at the clock: about a millisecond."""


@contextmanager
def time_limited(engine: Engine, seconds: float) -> Iterator[Connection]:
    """A connection. A statement that runs past the limit raises ReportTimeout."""
    deadline = time.monotonic() + seconds
    with engine.connect() as connection:
        sqlite: Any = None
        if engine.dialect.name == "sqlite":
            sqlite = connection.connection.driver_connection
            sqlite.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_EVERY)
        elif engine.dialect.name == "postgresql":
            connection.execute(text(f"SET LOCAL statement_timeout = {max(1, round(1000 * seconds))}"))
        try:
            yield connection
        except OperationalError as error:
            if time.monotonic() < deadline:
                raise
            raise ReportTimeout(f"the report took longer than {seconds:g} s; choose a shorter period") from error
        finally:
            if sqlite is not None:
                sqlite.set_progress_handler(None, 0)
