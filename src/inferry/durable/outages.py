"""Work that outlasts an outage of the database."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

INITIAL_RETRY_S, MAX_RETRY_S = 0.5, 30.0


async def until_done(work: Callable[[], Awaitable[T]], purpose: str) -> T:
    """The result of `work`, which is repeated while it fails. `purpose` names it in the log."""
    delay_s = INITIAL_RETRY_S
    while True:
        try:
            return await work()
        except Exception as error:
            log.error("cannot %s (next try in %.1f s): %s", purpose, delay_s, type(error).__name__)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)
