"""What makes amounts usable before jobs use them: watermarks in the database, or grants of shared limits."""

from collections.abc import Callable


class BudgetWriter:
    """Base of `WatermarkWriter` and `GrantClient`. Belongs to the loop it is started on.

    `on_written` gets the jobs whose batch is written, in the order in which they waited. It returns those that wait
    for the next batch too.
    """

    def __init__(self) -> None:
        self.on_written: Callable[[list[str]], list[str]] | None = None
        self._waiting: dict[int, list[str]] = {}

    def start(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        """Start a write, if one is due. The present burst of callbacks forms one batch."""
        raise NotImplementedError

    def wait(self, batch: int, job_id: str) -> None:
        """Have the job reported once its batch is written. Called before the batch is."""
        self._waiting.setdefault(batch, []).append(job_id)

    def rewrite_all(self) -> None:
        """The database was replaced: write everything to the new one."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def _report_written(self, written: int) -> None:
        """Report the jobs of all batches up to this one."""
        found = [job_id for batch in sorted(self._waiting) if batch <= written for job_id in self._waiting[batch]]
        if found:
            self._waiting = {batch: jobs for batch, jobs in self._waiting.items() if batch > written}
            if self.on_written is not None and (left := self.on_written(found)):
                self._waiting.setdefault(written + 1, [])[:0] = left
