"""The ledger's database as the stores of documents, files, batches and async jobs use it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from inferry.ledger.client_errors import as_client_errors
from inferry.ledger.stores.connector import Connector
from inferry.ledger.stores.opening import connect


class LedgerDatabase:
    """One connection behind a lock. Methods may be called from any thread, and block. Raises LedgerUnavailable."""

    def __init__(self, url: str) -> None:
        self.connector: Connector = connect(url)
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent view of the data."""
        with self._lock, as_client_errors(), self.connector.reading() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction: all of it is written or, after an exception, nothing."""
        with self._lock, as_client_errors(), self.connector.writing() as connection:
            yield connection

    def close(self) -> None:
        with self._lock:
            self.connector.close()
