"""How a gateway makes its storage."""

import asyncio
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from inferry.cli.config.callbacks import CallbacksConfig
from inferry.cli.storage_wiring import Storage, make_storage
from inferry.domain.clock import SystemClock
from inferry.domain.ledger import RetentionPolicy
from inferry.domain.storage import StorageLimits, StoredFile
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.files import FileStore


def storage_of(ledger: str, *, is_shared: bool) -> Storage:
    return make_storage(
        ledger,
        StorageLimits(),
        RetentionPolicy(),
        CallbacksConfig(),
        SystemClock(),
        MagicMock(),
        MagicMock(),
        MagicMock(),
        max_line_bytes=1000,
        is_shared=is_shared,
    )


@pytest.mark.parametrize(("is_shared", "left"), [(False, 0), (True, 1)])
def test_a_starting_gateway_keeps_uploads_of_other_gateways(tmp_path: Path, is_shared: bool, left: int) -> None:
    async def scenario() -> None:
        await storage_of(ledger, is_shared=is_shared).close()

    ledger = f"sqlite:///{tmp_path}/ledger.sqlite"
    with closing(LedgerDatabase(ledger)) as database:
        store = FileStore(database)
        file = StoredFile(
            id="f", tenant="acme", status="uploading", purpose="batch", filename="in.jsonl", size=0, created_at=1.0
        )
        store.begin(file)
        asyncio.run(scenario())
        assert store.discard_uploads() == left
