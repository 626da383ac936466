"""Watches the workers file and updates the pool accordingly.

One task polls the file every `POLL_INTERVAL_S`. An invalid file is logged and changes no worker, so that a typing error
does not remove a fleet.
"""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from inferry.dispatch.periodic_task import PeriodicTask
from inferry.domain.errors import GatewayError
from inferry.domain.ports import Worker
from inferry.domain.workers_file_content import read_workers_file

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
MTIME_RESOLUTION_S = 2.0
"""A file modified less than this ago is read again: it may have changed within the resolution of its time stamp."""

Entry = TypeVar("Entry")


class InvalidWorkersFile(Exception):
    """The file's content is invalid; the message names the place and the reason."""


class WatchedFile:
    """Returns a file's content whenever it has changed.

    The file may be replaced by a rename or written in place. A partly written file is at worst invalid until the next
    poll.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        self._stamp: tuple[int, ...] | None = None
        self._digest = None if content is None else _digest(content)

    def poll(self) -> bytes | None:
        """The content, or None if it has not changed. Raises OSError if the file cannot be read."""
        stat = os.stat(self.path)
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_ctime_ns)
        if stamp == self._stamp and time.time() - stat.st_mtime > MTIME_RESOLUTION_S:
            return None
        content = read_workers_file(self.path)
        self._stamp = stamp
        digest = _digest(content)
        if digest == self._digest:
            return None
        self._digest = digest
        return content

    def forget(self) -> None:
        """The content was invalid: report the same content again when the file has a new time stamp."""
        self._digest = None


class WorkerSet(Protocol):
    """What the entries are kept in: a pool, or a part of it."""

    def add(self, worker: Worker, kind: str = "") -> None: ...
    async def remove(self, name: str, grace_s: float) -> None: ...
    def worker(self, name: str) -> Worker | None: ...


class WorkerReconciler(Generic[Entry]):
    """Adds, replaces and removes workers until the pool matches a list of entries.

    An entry is any value that is equal only for equal configurations. Changes to one worker are applied in order,
    changes to different workers concurrently: a worker that drains slowly delays only its own replacement.
    """

    def __init__(
        self,
        pool: WorkerSet,
        make: Callable[[Entry], Awaitable[tuple[Worker, str]]],
        entries: Mapping[str, Entry],
        *,
        grace_s: float,
    ) -> None:
        self._pool = pool
        self._make = make
        self._entries = dict(entries)
        self._grace_s = grace_s
        self._changes: dict[str, asyncio.Task[None]] = {}
        """The last change of each worker."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def reconcile(self, wanted: Mapping[str, Entry]) -> None:
        """Begin to add, replace and remove workers to match `wanted`. Raises InvalidWorkersFile before any change."""
        new = {name: entry for name, entry in wanted.items() if self._entries.get(name) != entry}
        made = {name: await self._make(entry) for name, entry in new.items()}
        for name in [name for name in self._entries if name not in wanted or name in new]:
            self._enqueue_change(name, partial(self._remove, name, made.pop(name, None)))
        for name, (worker, kind) in made.items():
            self._enqueue_change(name, partial(self._add, worker, kind))
        self._entries = dict(wanted)

    async def wait_settled(self) -> None:
        """Wait until every change that has begun is complete."""
        while self._changes:
            await asyncio.wait(list(self._changes.values()))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _enqueue_change(self, name: str, change: Callable[[], Awaitable[None]]) -> None:
        before = self._changes.get(name)

        async def apply_change() -> None:
            if before is not None:
                await asyncio.wait([before])
            try:
                await change()
            except (GatewayError, ValueError) as error:
                log.warning("worker %s: %s", name, error)
            finally:
                if self._changes.get(name) is task:
                    del self._changes[name]

        task = self._changes[name] = asyncio.get_running_loop().create_task(apply_change())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self, worker: Worker, kind: str) -> None:
        log.info("worker %s is new", worker.name)
        self._pool.add(worker, kind)

    async def _remove(self, name: str, successor: tuple[Worker, str] | None) -> None:
        log.info("worker %s is %s", name, "removed" if successor is None else "replaced")
        try:
            await self._pool.remove(name, self._grace_s)
        finally:
            if successor is not None and self._pool.worker(name) is None:
                self._pool.add(*successor)


class WorkersFileWatcher(Generic[Entry]):
    """Polls the workers file and passes its entries to the reconciler."""

    def __init__(
        self, file: WatchedFile, read: Callable[[bytes], Mapping[str, Entry]], reconciler: WorkerReconciler[Entry]
    ) -> None:
        self._file = file
        self._read = read
        self._reconciler = reconciler
        self._last_error = ""
        self._polling = PeriodicTask(self.poll, POLL_INTERVAL_S, str(file.path))

    def start(self) -> None:
        self._polling.start()

    async def close(self) -> None:
        await self._polling.close()
        await self._reconciler.close()

    async def poll(self) -> None:
        try:
            content = await asyncio.to_thread(self._file.poll)
            if content is None:
                return
            # In a thread: a long list takes seconds to parse.
            await self._reconciler.reconcile(await asyncio.to_thread(self._read, content))
            self._last_error = ""
        except OSError as error:
            self._log_error_once(error.strerror or type(error).__name__)
        except InvalidWorkersFile as error:
            self._file.forget()
            self._log_error_once(str(error))

    def _log_error_once(self, message: str) -> None:
        if message != self._last_error:
            log.error("%s is invalid; workers are unchanged: %s", self._file.path, message)
            self._last_error = message


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
