"""A database file that may be deleted or replaced while it is open.

SQLite keeps using the file it has opened: after a replacement rows would be lost, and keys created by other processes
would never be seen. So before every use the opened file is compared with the one at the path.
"""

import os
from pathlib import Path

from sqlalchemy import Engine

from inferry.domain.ledger import LedgerFileLost
from inferry.ledger.stores.sqlite_open import LedgerUnusable, ledger_path, open_for_writing

_Identity = tuple[int, int]


class SqliteFile:
    """One connection to the file at the address. Used by one thread at a time.

    `generation` counts the files opened: after a change, everything read before is outdated.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._path = ledger_path(url)
        self.generation = 0
        self._engine = open_for_writing(url)
        self._record_identity()

    def engine(self) -> Engine:
        """The current database, reopened where the file was replaced. Raises LedgerGone."""
        path = self._path
        if path is None:
            return self._engine
        found = _identity(path)
        if found is None:
            raise LedgerFileLost(f"{path.absolute()} was deleted while in use; restore it or restart the gateway")
        if found != self._identity:
            self._reopen(path)
        return self._engine

    def close(self) -> None:
        self._engine.dispose()

    def _reopen(self, path: Path) -> None:
        # The WAL files of the former file do not belong to the new one. They are recognised by their inode, which no
        # other file can have while they are open here.
        for sidecar, identity in self._sidecars.items():
            if identity is not None and _identity(sidecar) == identity:
                sidecar.unlink(missing_ok=True)
        try:
            engine = open_for_writing(self._url)
        except LedgerUnusable as error:
            raise LedgerFileLost(f"{path.absolute()} was replaced while in use: {error}") from None
        self._engine.dispose()
        self._engine = engine
        self.generation += 1
        self._record_identity()

    def _record_identity(self) -> None:
        self._sidecars: dict[Path, _Identity | None] = {}
        self._identity: _Identity | None = None
        if self._path is not None:
            self._identity = _identity(self._path)
            for suffix in ("-wal", "-shm"):
                sidecar = self._path.with_name(self._path.name + suffix)
                self._sidecars[sidecar] = _identity(sidecar)


def _identity(path: Path) -> _Identity | None:
    """The file's identity; None where it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
