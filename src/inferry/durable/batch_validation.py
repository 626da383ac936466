"""Reads the input file of a batch into items, chunk by chunk. A file that is invalid fails the batch as a whole."""

from typing import Protocol

from inferry.domain.storage import Batch, BatchError, BatchItem, StoredFile
from inferry.durable.batch_input import MAX_ERRORS, LineSplitter, LineTooLong, duplicates, parse_lines
from inferry.durable.executor import StoreExecutor
from inferry.durable.files import Files


class ItemStore(Protocol):
    def clear_items(self, id: str) -> None: ...
    def add_items(self, id: str, items: list[BatchItem]) -> list[BatchItem]: ...


class Validation:
    """One batch. `errors` is empty where the file is valid; `total` counts its requests."""

    def __init__(
        self, batch: Batch, files: Files, store: ItemStore, executor: StoreExecutor, max_line_bytes: int
    ) -> None:
        self._batch = batch
        self._files = files
        self._store = store
        self._executor = executor
        self._max_line_bytes = max_line_bytes
        self.total = 0
        self.errors: list[BatchError] = []

    async def run(self) -> None:
        await self._executor.run(self._store.clear_items, self._batch.id)
        file = await self._files.get(self._batch.tenant, self._batch.input_file or "")
        if file is None:
            self.errors.append(BatchError("file_not_found", "the input file was deleted", param="input_file_id"))
            return
        try:
            await self._read(file)
        except LineTooLong as error:
            self.errors.append(BatchError("line_too_long", str(error)))
        except ConnectionAbortedError:
            self.errors.append(BatchError("file_not_found", "the input file was deleted", param="input_file_id"))
        if not self.total and not self.errors:
            self.errors.append(BatchError("empty_file", "the input file has no requests"))

    async def _read(self, file: StoredFile) -> None:
        splitter = LineSplitter(self._max_line_bytes)
        async for chunk in self._files.chunks(file):
            # Off the event loop, beside the writing.
            await self._executor.run(self._add, splitter.feed(chunk))
            if len(self.errors) >= MAX_ERRORS or not self._is_within_limit():
                return
        await self._executor.run(self._add, splitter.end())
        self._is_within_limit()

    def _add(self, lines: list[tuple[int, bytes]]) -> None:
        parsed = parse_lines(lines, self._batch.endpoint)
        repeated = self._store.add_items(self._batch.id, parsed.items) if parsed.items else []
        self.total += len(parsed.items) - len(repeated)
        found = sorted([*parsed.errors, *duplicates(repeated)], key=lambda error: error.line or 0)
        self.errors += found[: MAX_ERRORS - len(self.errors)]

    def _is_within_limit(self) -> bool:
        most = self._files.limits.max_batch_items
        if self.total <= most:
            return True
        self.errors.append(BatchError("too_many_requests", f"a batch may have at most {most} requests"))
        return False
