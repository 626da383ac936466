"""Fixtures that several rooms share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferry.engine.tiny import ensure_tiny_model
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving

# A shell that starts us in the background has us ignore interrupts, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    """One gateway for all tests that leave it as they found it."""
    small = {"server": {"max_body_bytes": 1_000_000, "body_timeout_s": 0.3}}
    with ScriptedGateway(tmp_path_factory.mktemp("scripted"), small) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, made once for all tests."""
    return ensure_tiny_model(tmp_path_factory.getbasetemp() / "inferry-tiny")


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Serving]:
    """One gateway with the embedded engine behind it, as `inferry serve` makes it."""
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    with Serving(tmp_path_factory.mktemp("real"), config={"workers": [worker]}) as gateway:
        yield gateway
