"""One gateway per database file.

Budgets are counted in the memory of one process, so two gateways on one file would each grant every budget in full. The
kernel releases the locks when the process ends. Readers and `inferry keys` do not take them. There are two:

- `flock` on a file beside the database with the suffix `.lock`. It holds even if the database is replaced while in use.
  The lock file is never removed: otherwise two processes could lock two files of the same name.
- A lock on the database file itself, for files with several names: hard links, and files mounted at several paths. It
  is a lock of the open file description on a byte that SQLite never uses, so neither affects the locks of the other.
"""

import fcntl
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferry.domain.ledger import LedgerLocked, LedgerUnusable
from inferry.domain.ledger_urls import IN_MEMORY
from inferry.ledger.stores.sqlite_open import require_file

_LOCK_BYTE = 1 << 62
"""Far behind the largest database and the bytes that SQLite locks."""


@contextmanager
def exclusive_use(url: str) -> Iterator[None]:
    """Lock the database for one gateway; create the file if needed. Raises LedgerLocked or LedgerUnusable."""
    if url == IN_MEMORY:
        yield
        return
    path = lock_file(url)
    database = path.with_suffix("")
    handles: list[int] = []
    try:
        handles.append(_open(path, "lock file"))
        try:
            fcntl.flock(handles[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerLocked(_locked_message(database, os.pread(handles[0], 32, 0))) from None
        except OSError as error:
            raise LedgerUnusable(f"cannot lock {path}: {error.strerror}; use a local file system") from None
        handles.append(_open(database, "ledger"))
        _lock_database(database, handles[1])
        os.ftruncate(handles[0], 0)
        os.pwrite(handles[0], b"%d\n" % os.getpid(), 0)
        yield
    finally:
        for handle in handles:
            os.close(handle)


def lock_file(url: str) -> Path:
    """Beside the resolved file, so that a database and symbolic links to it have one lock."""
    path = require_file(url).resolve()
    return path.with_name(f"{path.name}.lock")


def _open(path: Path, name: str) -> int:
    try:
        # Not inherited: a child that outlives the gateway must not keep the lock.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LedgerUnusable(f"cannot open the {name} {path}: {error.strerror}") from None


def _lock_database(path: Path, handle: int) -> None:
    if sys.platform != "linux":
        return
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _LOCK_BYTE, 1, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, lock)
    except (BlockingIOError, PermissionError):
        raise LedgerLocked(_locked_message(path, b"")) from None
    except OSError as error:
        raise LedgerUnusable(f"cannot lock {path}: {error.strerror}; use a local file system") from None


def _locked_message(path: Path, content: bytes) -> str:
    holder = content.decode("ascii", "replace").strip()
    owner = f"process {holder}" if holder.isdigit() else "another process"
    return (
        f"{owner} already uses this ledger ({path}); two gateways on one file would each grant every "
        "budget in full; stop the other one or configure another ledger"
    )
