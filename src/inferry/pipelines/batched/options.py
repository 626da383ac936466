"""The options of a batched function."""

from typing import Literal, NamedTuple

from inferry.domain.lanes import Lane
from inferry.pipelines.batched.batch_queue import BatchQueue, Window
from inferry.pipelines.batched.outcomes import OnError

LaneName = Literal["P0", "P1", "P2"]


class Options(NamedTuple):
    """What `batched` was called with; its docstring says what each option does."""

    max_batch: int
    window: Window
    window_ms: float
    max_queue: int | None
    concurrency: int
    lane: LaneName
    on_error: OnError

    def check(self) -> None:
        if self.max_batch < 1 or self.concurrency < 1 or (self.max_queue is not None and self.max_queue < 1):
            raise ValueError("max_batch, concurrency and max_queue must be at least 1")
        if self.window_ms < 0:
            raise ValueError("window_ms must not be negative")
        if self.window not in ("adaptive", "fixed", "off"):
            raise ValueError("window must be adaptive, fixed or off")
        if self.on_error not in ("bisect", "fail"):
            raise ValueError("on_error must be bisect or fail")
        self.lane_of(None)

    def lane_of(self, lane: LaneName | None) -> Lane:
        """The lane of a call."""
        name = self.lane if lane is None else lane
        try:
            return Lane[name]
        except KeyError:
            raise ValueError(f"lane must be P0, P1 or P2, not {name!r}") from None

    def make_queue(self) -> BatchQueue:
        return BatchQueue(
            max_batch=self.max_batch,
            window=self.window,
            window_s=self.window_ms / 1000,
            max_queue=self.max_queue,
        )
