"""Cancelling calls, and the proof that the engine has freed them.

A cancelled job ends at once; the result of `cancel_calls` says which jobs the engine is known to have freed. Where the
server aborts requests by id, the proof is the end of the request's own stream, which is awaited. Else the connection is
closed, and the proof is a metrics page that shows no more sequences than the remaining calls. Such a server signals
nothing, so its page is polled: six readings within one second at most.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, WorkerLost
from inferry.workers.http_client import Connection
from inferry.workers.openai_http.calls import Call
from inferry.workers.openai_http.metrics_poller import MetricsPoller
from inferry.workers.openai_http.pooled_calls import PooledCalls
from inferry.workers.openai_http.request_bodies import engine_id

ABORT_WAITS_S = (0.1, 0.3, 0.6)
"""How long to wait for a stream's end before its abort is sent again: an abort that overtakes its request is lost."""
CONFIRM_DELAYS_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.35)
"""Delays before the readings of the metrics page that may confirm a cancellation; their sum is 1 second."""
CANCELS_PER_YIELD = 50
"""Calls ended before the event loop serves other work (it yields, it waits for nothing). One takes about 50 µs."""

Abort = Callable[[Sequence[str]], Awaitable[bool]]


class StreamEndListener:
    """Reads the stream of a cancelled job until the engine reports its end; `finished` is whether it did."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.finished: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def on_head(self, status: int) -> None: ...

    def on_body(self, body: bytes) -> None:
        text_seen = self._tail + body
        # Quotes inside JSON strings are escaped, so generated text cannot contain these markers.
        if b'"finish_reason":"' in text_seen or b"\ndata: [DONE]" in text_seen:
            self._set_finished(True)
        self._tail = text_seen[-32:]

    def on_end(self) -> None:
        self._set_finished(True)

    def on_lost(self, cause: str) -> None:
        self._set_finished(False)

    def close(self) -> None:
        self.connection.close()
        self._set_finished(False)

    def _set_finished(self, confirmed: bool) -> None:
        if not self.finished.done():
            self.finished.set_result(confirmed)


async def cancel_jobs(
    job_ids: Iterable[str],
    pooled: PooledCalls,
    calls: Mapping[str, Call],
    abort: Abort | None,
    poller: MetricsPoller | None,
    clock: Clock,
) -> tuple[frozenset[str], int]:
    """`cancel_calls` for jobs of which some are pooled. The request of several pooled jobs ends with the last of them:
    until then the server computes the others, and none is freed.
    """
    others, emptied, continuing = pooled.leave(job_ids)
    freed: frozenset[str] = frozenset()
    unconfirmed = continuing
    if emptied:
        closed, _ = await cancel_calls(emptied, calls, None, poller, clock)
        freed = frozenset(job_id for name in closed for job_id in emptied[name])
        unconfirmed += sum(len(members) for name, members in emptied.items() if name not in closed)
    freed_others, unconfirmed_others = await cancel_calls(others, calls, abort, poller, clock)
    return freed | freed_others, unconfirmed + unconfirmed_others


async def cancel_calls(
    job_ids: Iterable[str],
    calls: Mapping[str, Call],
    abort: Abort | None,
    poller: MetricsPoller | None,
    clock: Clock,
) -> tuple[frozenset[str], int]:
    """End these calls; return the jobs known to be freed, and the number of the others.

    `abort` is None where the server cannot abort by id, `poller` where it has no metrics.
    """
    freed: set[str] = set()
    listeners: dict[str, tuple[str, StreamEndListener]] = {}
    closed: list[str] = []
    found = [call for job_id in job_ids if (call := calls.get(job_id)) is not None]
    for number, call in enumerate(found, 1):
        if number % CANCELS_PER_YIELD == 0:
            await asyncio.sleep(0)
        if call.end is not None:
            continue
        job_id = call.job.job_id
        if call.connection is None:
            freed.add(job_id)  # it was not sent
        elif abort is None:
            closed.append(job_id)
        else:
            connection = call.detach_connection()
            assert connection is not None
            listener = StreamEndListener(connection)
            connection.transfer(listener)
            listeners[job_id] = (engine_id(call.job), listener)
        call.fail(ClientClosed("cancelled"))
    if listeners and abort is not None:
        aborted = await abort_and_confirm(abort, listeners)
        freed |= aborted
        closed += listeners.keys() - aborted
    if closed and poller is not None and await confirm_gone(poller, calls, clock):
        freed.update(closed)
        closed = []
    return frozenset(freed), len(closed)


async def abort_and_confirm(abort: Abort, listeners: Mapping[str, tuple[str, StreamEndListener]]) -> set[str]:
    """Abort requests by the engine's ids; return the jobs whose streams have ended, and close the other connections."""
    pending = dict(listeners)
    try:
        for wait_s in ABORT_WAITS_S:
            if not await abort([engine_id for engine_id, _ in pending.values()]):
                break  # the server may have been replaced by one that cannot abort
            await asyncio.wait([listener.finished for _, listener in pending.values()], timeout=wait_s)
            pending = {job_id: entry for job_id, entry in pending.items() if not entry[1].finished.done()}
            if not pending:
                break
    except WorkerLost:
        pass
    finally:
        for _, listener in pending.values():
            listener.close()
    return {
        job_id for job_id, (_, listener) in listeners.items() if listener.finished.done() and listener.finished.result()
    }


async def confirm_gone(poller: MetricsPoller, calls: Mapping[str, Call], clock: Clock) -> bool:
    """Whether the engine's metrics show no more sequences than the open calls. No reading is no proof.

    This polls, because a server without aborts by id has no other signal. It ends after six readings.
    """
    for wait_s in CONFIRM_DELAYS_S:
        await asyncio.sleep(wait_s)
        snapshot = await poller.poll()
        if snapshot is None:
            return False
        now = clock.now()
        # Count only calls that the reading surely includes and that have not ended since.
        if snapshot.sequences <= sum(call.is_counted_by_engine(now) for call in calls.values()):
            return True
    return False
