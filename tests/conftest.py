"""Fixtures that several rooms share."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.scripted_worker import ScriptedWorker
from support.serving import Serving


class ScriptedGateway(Serving):
    """A gateway with one scripted worker behind it."""

    def __init__(self, directory: Path, config: dict[str, object] | None = None, **script: object) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, object]]:
            self.worker = ScriptedWorker(**script)  # type: ignore[arg-type]
            return [self.worker], {}

        super().__init__(directory, make, config)  # type: ignore[arg-type]
        self.worker: ScriptedWorker


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    """One gateway for all tests that leave it as they found it."""
    small = {"server": {"max_body_bytes": 1_000_000, "body_timeout_s": 0.3}}
    with ScriptedGateway(tmp_path_factory.mktemp("scripted"), small) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def no_stray_event_loop() -> Iterator[None]:
    """Tests that run a loop close it; a forgotten one would be reported far from its cause."""
    yield
    asyncio.set_event_loop(None)
