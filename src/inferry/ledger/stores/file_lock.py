"""One gateway per database file.

Budgets are counted in the memory of one process: two gateways on one file would each grant all of every ceiling. The
lock is `flock` on a file beside the database, named like it with `.lock` at the end. The kernel releases it with the
process, however that ends. Readers and `inferry keys` do not take it. The lock file stays: removing it would let two
processes lock two files of the same name.
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
    """Hold the database for one gateway. Raises LedgerLocked, or LedgerUnusable where no lock file can be made."""
    if url == IN_MEMORY:
        yield
        return
    path = lock_file(url)
    try:
        # Never passed on: a child that outlives the gateway must not keep the lock.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LedgerUnusable(f"cannot open {path}, which keeps a second gateway out: {error.strerror}") from None
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
    """Beside the file itself, so that two names for one database have one lock."""
    path = require_file(url).resolve()
    return path.with_name(f"{path.name}.lock")


def _locked_message(path: Path, content: bytes) -> str:
    holder = content.decode("ascii", "replace").strip()
    owner = f"process {holder}" if holder.isdigit() else "another process"
    return (
        f"{owner} already serves with this ledger ({path.with_suffix('')}): two gateways on one file would each grant "
        "all of every budget; stop that one, or give this one a ledger of its own"
    )
