"""Reads a `workers_file`, without blocking on what is not a file."""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 1 << 20
"""Enough for thousands of workers."""


def read_workers_file(path: Path) -> bytes:
    """The file's content. Raises OSError, also for anything but a regular file of at most `MAX_BYTES`."""
    # Opening a FIFO without O_NONBLOCK waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(handle)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MAX_BYTES} bytes")
    return content
