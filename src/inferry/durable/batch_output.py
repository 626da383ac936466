"""The output and error files of a batch, written in the order of its items."""

from collections.abc import AsyncIterator
from typing import Protocol

from inferry.domain.storage import Batch, ItemOutcome, StoredFile
from inferry.durable.batch_lines import line_of
from inferry.durable.executor import StoreExecutor
from inferry.durable.files import Files, Upload

PAGE_BYTES = 1024 * 1024


class Outcomes(Protocol):
    def outcomes(self, id: str, after: int, max_bytes: int) -> list[ItemOutcome]: ...


async def outcome_pages(batch: Batch, store: Outcomes, executor: StoreExecutor) -> AsyncIterator[list[ItemOutcome]]:
    """The items of a batch in their order, in pages of limited size."""
    last = 0
    while page := await executor.run(store.outcomes, batch.id, last, PAGE_BYTES):
        last = page[-1].number
        yield page


async def write_files(
    batch: Batch, store: Outcomes, files: Files, executor: StoreExecutor
) -> tuple[StoredFile | None, StoredFile | None]:
    """The files of successful and of other items, complete and not yet visible; None for one without lines."""
    uploads: dict[bool, Upload] = {}
    async for page in outcome_pages(batch, store, executor):
        for is_good in (True, False):
            lines = b"".join(line_of(batch, item) for item in page if (item.outcome == "succeeded") == is_good)
            if lines:
                if is_good not in uploads:
                    uploads[is_good] = await files.begin_output(batch.tenant)
                await uploads[is_good].write(lines)
    output, errors = uploads.get(True), uploads.get(False)
    ttl_s = batch.detail.output_ttl_s
    return (
        None
        if output is None
        else await output.complete(purpose="batch_output", filename=f"{batch.id}_output.jsonl", ttl_s=ttl_s),
        None
        if errors is None
        else await errors.complete(purpose="batch_output", filename=f"{batch.id}_error.jsonl", ttl_s=ttl_s),
    )
