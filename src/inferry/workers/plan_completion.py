"""The end of a plan as an awaitable."""

import asyncio


class PlanCompletion:
    """`finished` is done when every job of the plan has ended; it raises where the receiver of their items raised."""

    __slots__ = ("_remaining", "finished")

    def __init__(self, jobs: int) -> None:
        self._remaining = jobs
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def job_ended(self) -> None:
        self._remaining -= 1
        if not self._remaining and not self.finished.done():
            self.finished.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
