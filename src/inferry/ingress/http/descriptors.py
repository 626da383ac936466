"""Notices that no file descriptor is free.

The event loop then closes every new connection unanswered, without telling the gateway. So each check opens a file.
"""

import errno
import logging
import math
import os
import resource
from typing import Final

log = logging.getLogger(__name__)

REPEAT_S: Final = 60.0
"""Seconds between two log lines."""


class DescriptorMonitor:
    """Logs an error while no file descriptor is free, at most once in `REPEAT_S`."""

    __slots__ = ("_logged_at",)

    def __init__(self) -> None:
        self._logged_at = -math.inf

    def check(self, now: float) -> None:
        if now < self._logged_at + REPEAT_S:
            return
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._logged_at = now
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                log.error(
                    "no file descriptor is free (%s; the limit of this process is %d): new connections are closed "
                    "unanswered until one is; raise the limit (ulimit -n)",
                    error.strerror,
                    limit,
                )
