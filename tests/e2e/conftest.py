"""Fixtures of the end-to-end tests."""

import asyncio
import inspect
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


@pytest.fixture(scope="session")
def client_loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs coroutine tests, which are those of LangChain's standard suite. They share a loop because LangChain's models
    share their connections."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    runner: asyncio.Runner = pyfuncitem._request.getfixturevalue("client_loop")
    runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
