"""Embed stages of one run that start together make one call.

Belongs to the tasks of one run. The first stage leads: it waits until the event loop has run what is due, so that all
stages that start at the same time have asked, and makes the call for all of them. If it ends, all end.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Hashable

from inferry.domain.errors import GatewayError

Vectors = list["array[float]"]
Embed = Callable[[list[str], float | None], Awaitable[Vectors]]
"""Embeds texts until a deadline; None: there is none."""


class _Joint:
    """A call that is made for several stages, with the latest deadline of them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.deadline: float | None = 0.0
        self.vectors: Vectors | None = None
        self.error: GatewayError | None = None
        self.is_over = asyncio.Event()

    def add(self, texts: list[str], deadline: float | None) -> slice:
        begin = len(self.texts)
        self.texts += texts
        self.deadline = None if deadline is None or self.deadline is None else max(deadline, self.deadline)
        return slice(begin, len(self.texts))


class JointEmbeds:
    """The calls of one run that may still be joined, by model and options."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Joint] = {}

    async def embed(self, key: Hashable, texts: list[str], deadline: float | None, embed: Embed) -> Vectors:
        """The vectors of the texts, of a call with those of other stages with the same key.

        A call that is refused as invalid is made again by each stage alone: only the stage whose text is invalid fails.
        """
        joint = self._open.get(key)
        if joint is None:
            joint = self._open[key] = _Joint()
            own = joint.add(texts, deadline)
            await self._lead(key, joint, embed)
        else:
            own = joint.add(texts, deadline)
            await joint.is_over.wait()
        if joint.error is not None:
            if joint.error.status == 400 and len(joint.texts) > len(texts):
                return await embed(texts, deadline)
            raise joint.error
        assert joint.vectors is not None, "its leader was not cancelled"
        return joint.vectors[own]

    async def _lead(self, key: Hashable, joint: _Joint, embed: Embed) -> None:
        try:
            await asyncio.sleep(0)
            del self._open[key]
            joint.vectors = await embed(joint.texts, joint.deadline)
        except GatewayError as error:
            joint.error = error
        finally:
            joint.is_over.set()
