"""Writes results of stored work, many in one transaction: what arrives during a write goes into the next.

The ledger's rows are written first. A process that is killed in between repeats the call under the same job id, and the
ledger keeps the row it has: every result is charged once.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from inferry.domain.errors import InvalidRequest
from inferry.durable.executor import StoreExecutor

log = logging.getLogger(__name__)

INITIAL_RETRY_S, MAX_RETRY_S = 0.05, 2.0
UNSTORABLE = (InvalidRequest, ValueError, OverflowError)
"""Raised for a text or number that the database does not have."""


RecordT = TypeVar("RecordT")


class ResultStore(Protocol[RecordT]):
    def record(self, records: list[RecordT]) -> None: ...


class ResultRecorder(Generic[RecordT]):
    """Belongs to one event loop. A record is in the database when `record` returns.

    A write that fails is repeated until it succeeds. Callers wait meanwhile, so memory stays bounded by their number.
    A record that can never be stored is left out, and `record` raises why. `write_ledger` returns when the ledger has
    the rows of all calls that have ended. It blocks.
    """

    def __init__(
        self, store: ResultStore[RecordT], executor: StoreExecutor, write_ledger: Callable[[], object]
    ) -> None:
        self._store = store
        self._write_ledger = write_ledger
        self._executor = executor
        self._waiting: list[tuple[RecordT, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def record(self, record: RecordT) -> None:
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._waiting.append((record, written))
        if self._task is None:
            self._task = loop.create_task(self._write())
        await written

    async def flush(self) -> None:
        """Wait until everything recorded before is written, also what no caller waits for any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Write what is left, for a short time."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=MAX_RETRY_S)
            if self._task is not None:
                self._task.cancel()

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._write_with_retry(batch)
        finally:
            self._task = None

    def _write_all(self, records: list[RecordT]) -> None:
        self._write_ledger()
        self._store.record(records)

    async def _write_with_retry(self, batch: list[tuple[RecordT, asyncio.Future[None]]]) -> None:
        delay_s = INITIAL_RETRY_S
        while True:
            try:
                await self._executor.run(self._write_all, [record for record, _ in batch])
            except UNSTORABLE as error:
                if len(batch) == 1:
                    log.error("a result of stored work can never be stored: %s", type(error).__name__)
                    _end(batch[0][1], error)
                else:
                    for one in batch:
                        await self._write_with_retry([one])
                return
            except Exception as error:
                log.error("cannot write results of stored work (retry in %.2f s): %s", delay_s, type(error).__name__)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)
            else:
                for _, written in batch:
                    _end(written, None)
                return


def _end(written: asyncio.Future[None], error: Exception | None) -> None:
    if written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
