"""Work of the queue as a pull-worker sees it: content and results go through a gateway.

Belongs to one event loop. Results are sent until a gateway has stored them, whichever gateway answers.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry
from inferry.durable.execute import CallAnswer
from inferry.durable.pulled_work import (
    EndedWork,
    LoadedWork,
    Message,
    OpenRequest,
    TryReport,
    WorkReport,
    WorkRequest,
)
from inferry.durable.stored_work import StoredWork
from inferry.durable.work_runner import WorkRefused

log = logging.getLogger(__name__)

INITIAL_RETRY_S, MAX_RETRY_S = 0.1, 5.0
MAX_ROWS = 10_000
GPU_TIME_ROWS = 256
"""Rows of GPU time in one report; the rest goes with later ones."""
ASKED_AT_ONCE = 256
_loaded = msgspec.json.Decoder(LoadedWork)
_ended = msgspec.json.Decoder(EndedWork)


class NoGateway(Exception):
    """No gateway could be asked, or none accepts the pull-worker. The message quotes nothing of a request."""


class CollectedRows:
    """The ledger of a pull-worker: keeps rows until they are sent with a result. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, list[LedgerEntry]] = {}
        self._gpu_time: list[GpuTimeRow] = []

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        with self._lock:
            for entry in entries:
                self._entries.setdefault(entry.job_id.rpartition("-")[0], []).append(entry)
            while len(self._entries) > MAX_ROWS:  # of work that another holder has taken over
                del self._entries[next(iter(self._entries))]

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None:
        with self._lock:
            self._gpu_time = [*self._gpu_time, *rows][-MAX_ROWS:]

    def append_composed(self, rows: Sequence[ComposedRow]) -> None:
        """A pull-worker has no composed models."""

    def take(self, work_id: str) -> tuple[list[LedgerEntry], list[GpuTimeRow]]:
        """Rows of the work, and GPU time so far."""
        with self._lock:
            rows, self._gpu_time = self._gpu_time[:GPU_TIME_ROWS], self._gpu_time[GPU_TIME_ROWS:]
            # A call with several prompts has a job per prompt, whose ids begin with that of the call.
            found = [key for key in self._entries if key == work_id or key.startswith(f"{work_id}-")]
            return [entry for key in found for entry in self._entries.pop(key)], rows

    def close(self) -> None:
        pass


class GatewayWork:
    """Implements `WorkSource`. `post` sends a message to a gateway. It raises NoGateway, and WorkRefused for a
    message that is never accepted. `flush` returns when the rows of all calls that have ended are in `rows`. It blocks.
    """

    def __init__(
        self,
        post: Callable[[bytes], Awaitable[bytes]],
        models: Sequence[str],
        rows: CollectedRows,
        flush: Callable[[], object],
    ) -> None:
        self._post = post
        self._models = tuple(models)
        self._rows = rows
        self._flush = flush
        self._max_bytes: int | None = None

    async def load(self, ids: Sequence[str]) -> Mapping[str, StoredWork]:
        works: dict[str, StoredWork] = {}
        left = list(ids)
        while True:
            asked, left = left[:ASKED_AT_ONCE], left[ASKED_AT_ONCE:]
            message = WorkRequest(models=self._models, ids=tuple(asked))
            found = _loaded.decode(await self._post(msgspec.json.encode(message)))
            self._max_bytes = found.max_bytes
            works.update((work.id, work) for work in found.work)
            if asked and len(found.left) >= len(asked):
                raise WorkRefused("the gateway hands out none of the work")
            left = [*found.left, *left]
            if not left:
                return works

    async def ended(self, ids: Sequence[str]) -> Collection[str]:
        return _ended.decode(await self._post(msgspec.json.encode(OpenRequest(ids=tuple(ids))))).ended

    async def begin_try(self, work: StoredWork, tries: int) -> None:
        await self._send(TryReport(id=work.id, tries=tries))

    async def finish(self, work: StoredWork, answer: CallAnswer) -> None:
        await self._report(work, answer)

    async def expire(self, work: StoredWork) -> None:
        await self._report(work, None)

    async def _report(self, work: StoredWork, answer: CallAnswer | None) -> None:
        await asyncio.to_thread(self._flush)
        entries, gpu_time = self._rows.take(work.id)
        report = WorkReport(id=work.id, answer=answer, entries=tuple(entries), gpu_time=tuple(gpu_time))
        try:
            await self._send(report)
        except WorkRefused as error:
            log.error("the result of work %s cannot be reported: %s", work.id, error)
            await self._send(replace(report, answer=None, problem=f"its result cannot be reported: {error}"))

    async def _send(self, message: Message) -> None:
        """Send until a gateway has stored it. Raises WorkRefused where none will."""
        data = msgspec.json.encode(message)
        if self._max_bytes is not None and len(data) > self._max_bytes:
            raise WorkRefused(f"{len(data)} bytes; the gateway accepts {self._max_bytes} (server.max_body_bytes)")
        delay_s = INITIAL_RETRY_S
        while True:
            try:
                await self._post(data)
                return
            except NoGateway as error:
                log.error("a result waits for a gateway (next try in %.1f s): %s", delay_s, error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)
