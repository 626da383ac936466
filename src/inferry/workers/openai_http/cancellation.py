"""The proof that an engine has let go of what was cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from inferry.domain.clock import Clock
from inferry.domain.errors import WorkerLost
from inferry.workers.openai_http.calls import Call, StreamEndListener
from inferry.workers.openai_http.metrics_poller import MetricsPoller

ABORT_WAITS_S = (0.1, 0.3, 0.6)
"""How long an abort may take to show in the stream before it is sent again: what has not reached the engine yet cannot
be aborted there."""
CONFIRM_DELAYS_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.35)
"""When the engine is asked whether what was cancelled is gone."""

Abort = Callable[[Sequence[str]], Awaitable[bool]]


async def abort_and_confirm(abort: Abort, listeners: Mapping[str, tuple[str, StreamEndListener]]) -> set[str]:
    """Abort requests by the engine's ids; the jobs whose streams have said that they are over. The connections of the
    others are closed.
    """
    pending = dict(listeners)
    try:
        for wait_s in ABORT_WAITS_S:
            if not await abort([engine_id for engine_id, _ in pending.values()]):
                break  # a server that started again may be another
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


async def confirm_gone(engine: MetricsPoller, calls: Mapping[str, Call], clock: Clock) -> bool:
    """Whether the engine, asked a few times from now on, does no more than the calls that are open. A question that it
    leaves open is no proof.
    """
    for wait_s in CONFIRM_DELAYS_S:
        await asyncio.sleep(wait_s)
        snapshot = await engine.poll()
        if snapshot is None:
            return False
        now = clock.now()
        # Only calls that are surely part of the reading count, and those that have not ended meanwhile.
        if snapshot.sequences <= sum(call.is_counted_by_engine(now) for call in calls.values()):
            return True
    return False
