"""The LoRA adapters that an engine serves, by name.

One event loop owns all state. An adapter has a number that is never used again, so that an engine cannot confuse two
adapters of one name. The table outlives the engine's process: a new process is told to load all adapters again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from inferry.domain.errors import Conflict, InvalidRequest, NotFound, NoWorker
from inferry.engine.messages import AdapterChanged, LoadAdapter, ToEngine, UnloadAdapter

logger = logging.getLogger(__name__)


class _Adapter(NamedTuple):
    number: int
    directory: Path


class AdapterTable:
    """`adapters` are served from the start. Others may be loaded from below `roots`. `send` sends a message to the
    engine, and returns False where none is connected.
    """

    def __init__(
        self, worker: str, adapters: Mapping[str, Path], roots: Sequence[Path], send: Callable[[ToEngine], bool]
    ) -> None:
        self._worker = worker
        self._roots = [root.resolve() for root in roots]
        self._send = send
        self._numbers = count(1)
        self._adapters = {name: _Adapter(next(self._numbers), path.resolve()) for name, path in adapters.items()}
        self._loading: set[str] = set()
        self._answers: dict[int, asyncio.Future[str | None]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def number(self, name: str) -> int | None:
        """The number of an adapter; None if it is not served."""
        found = self._adapters.get(name)
        return None if found is None else found.number

    def may_load(self, path: str) -> bool:
        return self._allowed(path) is not None

    async def load(self, name: str, path: str) -> None:
        """Returns once the engine has loaded the adapter. Raises Conflict, InvalidRequest or NoWorker."""
        if name in self._adapters or name in self._loading:
            raise Conflict(f"there is an adapter `{name}` already")
        directory = self._allowed(path)
        if directory is None:
            raise InvalidRequest(
                "`lora_path` is not below a directory that `adapter_dirs` of the worker names", param="lora_path"
            )
        adapter = _Adapter(next(self._numbers), directory)
        self._loading.add(name)
        try:
            error = await self._ask(adapter.number, LoadAdapter(adapter.number, str(directory)))
        finally:
            self._loading.discard(name)
        if error is not None:
            raise InvalidRequest(f"the adapter was not loaded: {error}", param="lora_path")
        self._adapters[name] = adapter

    def unload(self, name: str) -> Coroutine[Any, Any, None]:
        """The name is not served from this call on. To be awaited: it ends once the calls that use the adapter have
        ended and it is freed, and raises NotFound.
        """
        return self._free(name, self._adapters.pop(name, None))

    async def _free(self, name: str, adapter: _Adapter | None) -> None:
        if adapter is None:
            raise NotFound(f"there is no adapter `{name}`")
        try:
            await self._ask(adapter.number, UnloadAdapter(adapter.number))
        except NoWorker:
            return  # the process that had it is gone

    def engine_ready(self) -> None:
        """A new process runs: it loads all adapters before it gets calls for them."""
        for adapter in self._adapters.values():
            self._send(LoadAdapter(adapter.number, str(adapter.directory)))

    def engine_lost(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(NoWorker(f"the engine of worker {self._worker} was lost"))

    def on_message(self, message: AdapterChanged) -> None:
        answer = self._answers.get(message.adapter)
        if answer is not None and not answer.done():
            answer.set_result(message.error)
        elif message.error is not None:
            for name in [name for name, adapter in self._adapters.items() if adapter.number == message.adapter]:
                del self._adapters[name]
                logger.error("worker %s did not load adapter %s: %s", self._worker, name, message.error)

    def _allowed(self, path: str) -> Path | None:
        """The directory, if it is below one that the configuration allows. Links are followed first."""
        try:
            directory = Path(path).resolve()
        except (OSError, ValueError):  # no path: too long, or with a NUL
            return None
        return directory if any(root in directory.parents for root in self._roots) else None

    async def _ask(self, number: int, message: LoadAdapter | UnloadAdapter) -> str | None:
        """Send the message; return the engine's error, if any. Raises NoWorker if the engine is lost."""
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            if not self._send(message):
                raise NoWorker(f"the engine of worker {self._worker} is not running")
            return await answer
        finally:
            del self._answers[number]
