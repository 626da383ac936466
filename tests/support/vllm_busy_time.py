"""A scheduler for a vLLM server that adds up the time for which its engine has requests.

Loaded by vLLM itself (`--scheduler-cls support.vllm_busy_time.TimedScheduler`). The sum so far, in seconds, is in the
file named by BUSY_TIME_FILE whenever the engine is idle.
"""

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

BUSY_TIME_FILE = "BUSY_TIME_FILE"


class TimedScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's own scheduler, with a clock."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file = Path(os.environ[BUSY_TIME_FILE])
        self._busy_s = 0.0
        self._busy_since: float | None = None

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def update_from_output(self, *arguments: Any, **options: Any) -> Any:
        outputs = super().update_from_output(*arguments, **options)
        self._note_idle()
        return outputs

    def finish_requests(self, *arguments: Any, **options: Any) -> Any:
        finished = super().finish_requests(*arguments, **options)
        self._note_idle()
        return finished

    def _note_idle(self) -> None:
        if self._busy_since is not None and not self.get_num_unfinished_requests():
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None
            self._file.write_text(repr(self._busy_s))
