"""The proof that an engine has let go of what was cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from inferry.adapters.workers.calls import Call, LastWords
from inferry.adapters.workers.engine_watch import EngineWatch
from inferry.domain.clock import Clock
from inferry.domain.errors import WorkerLost

ABORT_S = (0.1, 0.3, 0.6)
"""How long an abort may take to show in the stream before it is sent again: what has not reached the engine yet cannot
be aborted there."""
CONFIRM_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.35)
"""When the engine is asked whether what was cancelled is gone."""

Abort = Callable[[Sequence[str]], Awaitable[bool]]


async def abort_and_listen(abort: Abort, listening: Mapping[str, tuple[str, LastWords]]) -> set[str]:
    """Abort requests by the engine's ids; the jobs whose streams have said that they are over. The connections of the
    others are closed.
    """
    left = dict(listening)
    try:
        for wait_s in ABORT_S:
            if not await abort([engine_id for engine_id, _ in left.values()]):
                break  # a server that started again may be another
            await asyncio.wait([words.over for _, words in left.values()], timeout=wait_s)
            left = {job_id: one for job_id, one in left.items() if not one[1].over.done()}
            if not left:
                break
    except WorkerLost:
        pass
    finally:
        for _, words in left.values():
            words.close()
    return {job_id for job_id, (_, words) in listening.items() if words.over.done() and words.over.result()}


async def is_gone(engine: EngineWatch, calls: Mapping[str, Call], clock: Clock) -> bool:
    """Whether the engine, asked a few times from now on, does no more than the calls that are open. A question that it
    leaves open is no proof.
    """
    for wait_s in CONFIRM_S:
        await asyncio.sleep(wait_s)
        reading = await engine.look()
        if reading is None:
            return False
        now = clock.now()
        # Only calls that are surely part of the reading count, and those that have not ended meanwhile.
        if reading.sequences <= sum(call.is_surely_seen(now) for call in calls.values()):
            return True
    return False
