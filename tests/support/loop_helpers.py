"""Helpers for tests of a gateway in one process: a ledger in memory, a reader, and waiting."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry
from inferry.domain.streams import Delta, End
from inferry.streams.mailbox import JobStream
from support.virtual_time import run_virtual


class ListLedger:
    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self.gpu_time: list[GpuTimeRow] = []

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        self.entries.extend(entries)

    def append_composed(self, rows: Sequence[ComposedRow]) -> None:
        pass

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None:
        self.gpu_time.extend(rows)

    def close(self) -> None:
        pass


async def read(stream: JobStream) -> tuple[list[Delta], End]:
    deltas: list[Delta] = []
    while True:
        delta, end = await stream.take()
        if delta is not None:
            deltas.append(delta)
        if end is not None:
            return deltas, end


async def run_pending(count: int = 20) -> None:
    """Let everything that is due on the loop happen."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    """In virtual time; whatever has a clock there must have a `LoopClock`."""
    run_virtual(asyncio.wait_for(work, 120))
