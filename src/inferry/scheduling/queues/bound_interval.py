"""Which limit binds a queue, and for how long: an interval per limit, and none per job.

A queue whose head no worker accepts is bound by what keeps that head out, and every job behind it waits for the same. A
job keeps a reference to the interval in which it became ready and to the one in which it left; the difference is what
it waited for. So a job costs two references, however long it waits.
"""

from typing import Final

_MIN_S: Final = 1e-6


class BoundInterval:
    """One limit binds the queue since `since`. `earlier` holds the seconds of the intervals before it, by limit.

    `worker` is the worker whose limit it is, None where none is up: the least loaded one of several, which may change
    within the interval.
    """

    __slots__ = ("earlier", "limit", "since", "worker")

    def __init__(self, limit: str, worker: str | None, since: float, earlier: dict[str, float]) -> None:
        self.limit = limit
        self.worker = worker
        self.since = since
        self.earlier = earlier

    def seconds_until(self, now: float) -> dict[str, float]:
        """Seconds by limit since the queue was last without a bound."""
        seconds = self.earlier.copy()
        seconds[self.limit] = seconds.get(self.limit, 0.0) + now - self.since
        return seconds


def bound_by(current: BoundInterval | None, limit: str, worker: str | None, now: float) -> BoundInterval:
    """The interval of a queue that this limit binds now: the current one, or the next."""
    if current is None:
        return BoundInterval(limit, worker, now, {})
    if current.limit == limit:
        current.worker = worker
        return current
    return BoundInterval(limit, worker, now, current.seconds_until(now))


def waits_between(first: BoundInterval | None, ready_at: float, last: BoundInterval, now: float) -> dict[str, float]:
    """Seconds by limit of a job that became ready in the first interval and left in the last. None: before any."""
    if first is last:
        return {last.limit: now - ready_at}
    seconds = last.seconds_until(now)
    if first is not None:
        for limit, before_s in first.seconds_until(ready_at).items():
            seconds[limit] = seconds.get(limit, 0.0) - before_s
    return {limit: waited_s for limit, waited_s in seconds.items() if waited_s > _MIN_S}
