"""One gateway per database file.

Budgets are counted in the memory of one process, so two gateways on one file would each grant every budget in full. The
lock is `flock` on a file beside the database with the suffix `.lock`. The kernel releases it when the process ends.
Readers and `inferry keys` do not take it. The lock file is never removed: otherwise two processes could lock two files
of the same name.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferry.domain.ledger_urls import IN_MEMORY
from inferry.ledger.stores.sqlite_open import LedgerUnusable, require_file


class LedgerLocked(LedgerUnusable):
    """Another gateway uses the database."""


@contextmanager
def exclusive_use(url: str) -> Iterator[None]:
    """Lock the database for one gateway. Raises LedgerLocked, or LedgerUnusable without a lock file."""
    if url == IN_MEMORY:
        yield
        return
    path = lock_file(url)
    try:
        # Not inherited: a child that outlives the gateway must not keep the lock.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LedgerUnusable(f"cannot open the lock file {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerLocked(_locked_message(path, os.pread(handle, 32, 0))) from None
        except OSError as error:
            raise LedgerUnusable(f"cannot lock {path}: {error.strerror}; use a local file system") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(handle)


def lock_file(url: str) -> Path:
    """Beside the resolved file, so that two names of one database have one lock."""
    path = require_file(url).resolve()
    return path.with_name(f"{path.name}.lock")


def _locked_message(path: Path, content: bytes) -> str:
    holder = content.decode("ascii", "replace").strip()
    owner = f"process {holder}" if holder.isdigit() else "another process"
    return (
        f"{owner} already uses this ledger ({path.with_suffix('')}); two gateways on one file would each grant every "
        "budget in full; stop the other one or configure another ledger"
    )
