"""Fixtures of the HTTP tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingress.http.raw_client import Gated


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    with Gated(tmp_path) as gateway:
        yield gateway
