"""The gateway's side of a replica: a `Link` over calls of the actor `EngineHost`.

One event loop owns all state. Messages sent in one turn of the loop leave in one call.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from msgspec import Struct
from ray.exceptions import RayError

from inferry.engine.messages import Frames, frame

log = logging.getLogger(__name__)

NAMESPACE = "inferry"
"""Ray's namespace of the actors that run engines."""
HEARTBEAT_S = 1.0


class RayLink:
    """A session with one replica's engine; `finished` is done when the session has ended."""

    def __init__(self, host: Any, on_message: Callable[[bytes], None]) -> None:
        self.exit_message: str | None = None
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host = host
        self._on_message = on_message
        self._session_id = uuid.uuid4().hex
        self._frames = Frames()
        self._outbox: list[bytes] = []
        self._number = 0
        self._is_open = False

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, actor: str, on_message: Callable[[bytes], None]) -> "AsyncIterator[RayLink]":
        """Connect to the actor of this name. Raises OSError where there is none."""
        try:
            host = await asyncio.to_thread(ray.get_actor, actor, namespace=NAMESPACE)
        except (ValueError, RayError) as error:
            raise OSError(f"replica {actor} does not exist") from error
        link = cls(host, on_message)
        tasks = [asyncio.create_task(link._read()), asyncio.create_task(link._send_heartbeats())]
        try:
            yield link
        finally:
            if link._is_open:
                host.disconnect.options(num_returns=0).remote(link._session_id)
            link._is_open = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def finished(self) -> "asyncio.Future[None]":
        return self._finished

    @property
    def pid(self) -> int | None:
        return None

    def send(self, message: Struct) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame(message))

    def kill(self) -> None:
        """Kill the actor; Ray Serve replaces its replica."""
        try:
            ray.kill(self._host)
        except RayError as error:
            log.warning("a replica could not be killed: %s", type(error).__name__)

    def _flush(self) -> None:
        data, self._outbox = b"".join(self._outbox), []
        if self._is_open:
            # The number puts batches in order: Ray may deliver a large one after a small one that left later.
            self._host.send.options(num_returns=0).remote(self._session_id, self._number, data)
            self._number += 1

    async def _read(self) -> None:
        try:
            batches = self._host.connect.options(num_returns="streaming").remote(self._session_id)
            async for batch in batches:
                data = await batch
                self._is_open = True
                for body in self._frames.feed(data):
                    self._on_message(body)
        except RayError as error:
            self.exit_message = self.exit_message or f"the replica was lost ({type(error).__name__})"
        except Exception:
            log.exception("a message of a replica could not be read")
        finally:
            self._is_open = False
            if not self._finished.done():
                self._finished.set_result(None)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._flush()
