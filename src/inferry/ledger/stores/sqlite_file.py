"""A database file that may be deleted or replaced while it is open.

SQLite goes on with the file it has opened, whatever its name stands for by now: rows would be lost,
and keys that others create would never be seen. So the file that the path names is compared with the one that was
opened before every use: one look at the directory.
"""

import os
from pathlib import Path

from sqlalchemy import Engine

from inferry.domain.ledger import LedgerFileLost
from inferry.ledger.stores.sqlite_open import LedgerUnusable, ledger_path, open_for_writing

_Identity = tuple[int, int]


class SqliteFile:
    """One connection to the file at the address. Used by one thread at a time.

    `generation` counts the files that were opened: after a change nothing that was read before is known to hold.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._path = ledger_path(url)
        self.generation = 0
        self._engine = open_for_writing(url)
        self._record_identity()

    def engine(self) -> Engine:
        """The database as it is now, opened anew where it is another file. Raises LedgerGone."""
        path = self._path
        if path is None:
            return self._engine
        found = _identity(path)
        if found is None:
            raise LedgerFileLost(f"{path.absolute()} was deleted while the gateway runs; put it back, or start again")
        if found != self._identity:
            self._reopen(path)
        return self._engine

    def close(self) -> None:
        self._engine.dispose()

    def _reopen(self, path: Path) -> None:
        # What the former file had not taken in yet stands in files of its own, and is nothing for the new one. They are
        # told by their identity, which nothing else can have while they are open here.
        for sidecar, identity in self._sidecars.items():
            if identity is not None and _identity(sidecar) == identity:
                sidecar.unlink(missing_ok=True)
        try:
            engine = open_for_writing(self._url)
        except LedgerUnusable as error:
            raise LedgerFileLost(f"{path.absolute()} was replaced while the gateway runs: {error}") from None
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
    """None where there is no file that can be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
