"""A list of workers in a file, and the part of the pool that follows it.

One task looks at the file about once a second. What cannot be used is told to the log, and the workers stay as they
are: a fleet must not be lost to a typing error.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from inferry.dispatch.pool import Pool
from inferry.domain.errors import GatewayError
from inferry.domain.ports import Worker
from inferry.domain.workers_file_content import read_workers_file

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
MTIME_RESOLUTION_S = 2.0
"""A file younger than this may change once more without a new date: clocks of file systems tick in milliseconds."""

Entry = TypeVar("Entry")


class InvalidWorkersFile(Exception):
    """What the file says cannot be done; the message says where and why."""


class WatchedFile:
    """A file's content, whenever it is another than before.

    Replacing the file by renaming another over it is safe, and so is writing it in place: half a file is at worst one
    that cannot be used, until the next look.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        self._stamp: tuple[int, ...] | None = None
        self._digest = None if content is None else _digest(content)

    def poll(self) -> bytes | None:
        """The content, or None where it is the same as last time. Raises OSError where it cannot be read."""
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
        """The content was of no use: with a new date on it, it is worth another try."""
        self._digest = None


class WorkerReconciler(Generic[Entry]):
    """Workers that come and go as a list of entries says. An entry is anything that tells two configurations apart.

    Changes of one worker happen one after another, those of different workers side by side: a worker that takes its
    time to drain holds up only its own successor.
    """

    def __init__(
        self,
        pool: Pool,
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

    async def reconcile(self, wanted: Mapping[str, Entry]) -> None:
        """Begin to add, replace and remove until the fleet is what is wanted. Raises Unusable, and then nothing has
        changed.
        """
        new = {name: entry for name, entry in wanted.items() if self._entries.get(name) != entry}
        made = {name: await self._make(entry) for name, entry in new.items()}
        for name in [name for name in self._entries if name not in wanted or name in new]:
            self._enqueue_change(name, partial(self._remove, name, made.pop(name, None)))
        for name, (worker, kind) in made.items():
            self._enqueue_change(name, partial(self._add, worker, kind))
        self._entries = dict(wanted)

    async def wait_settled(self) -> None:
        """Until every change that has begun is done."""
        while self._changes:
            await asyncio.wait(list(self._changes.values()))

    async def close(self) -> None:
        changes = list(self._changes.values())
        for task in changes:
            task.cancel()
        await asyncio.gather(*changes, return_exceptions=True)

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
    """Looks at the file, reads it, and has the fleet follow it."""

    def __init__(
        self, file: WatchedFile, read: Callable[[bytes], Mapping[str, Entry]], reconciler: WorkerReconciler[Entry]
    ) -> None:
        self._file = file
        self._read = read
        self._reconciler = reconciler
        self._last_error = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
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

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await self.poll()
            except Exception:
                log.exception("failed to poll %s", self._file.path)

    def _log_error_once(self, message: str) -> None:
        if message != self._last_error:
            log.error("%s is invalid; workers are unchanged: %s", self._file.path, message)
            self._last_error = message


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
