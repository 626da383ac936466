"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.isolation_gateway import House


@pytest.fixture
def env(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path) as gateway, ThreadPoolExecutor(8) as gateway.clients:
        gateway.settle()
        yield gateway
        if gateway.is_alive:
            gateway.hold(back=False)
