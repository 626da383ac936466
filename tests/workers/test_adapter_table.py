"""The adapters of an engine worker: names, allowed paths, a lost engine, and a new one."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.errors import Conflict, InvalidRequest, NotFound, NoWorker
from inferry.engine.messages import AdapterChanged, LoadAdapter, ToEngine, UnloadAdapter
from inferry.workers.in_process.adapter_table import AdapterTable
from support.loop_helpers import run_pending


class Engine:
    """Keeps what is sent; `is_up` says whether a process is connected."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.is_up = True

    def send(self, message: ToEngine) -> bool:
        if self.is_up:
            self.sent.append(message)
        return self.is_up


def a_table(root: Path, **adapters: str) -> tuple[AdapterTable, Engine]:
    engine = Engine()
    return AdapterTable("w", {name: root / path for name, path in adapters.items()}, [root], engine.send), engine


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_an_adapter_is_served_once_the_engine_has_loaded_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        table, engine = a_table(tmp_path)
        loading = asyncio.create_task(table.load("sql", str(tmp_path / "a")))
        await run_pending()
        assert engine.sent == [LoadAdapter(1, str(tmp_path / "a"))]
        assert table.number("sql") is None
        with pytest.raises(Conflict, match="already"):
            await table.load("sql", str(tmp_path / "b"))
        table.on_message(AdapterChanged(1))
        await loading
        assert (table.names, table.number("sql")) == (("sql",), 1)
        with pytest.raises(Conflict, match="already"):
            await table.load("sql", str(tmp_path / "b"))

    run(scenario)


def test_an_adapter_that_the_engine_refuses_is_not_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        table, _ = a_table(tmp_path)
        loading = asyncio.create_task(table.load("sql", str(tmp_path / "a")))
        await run_pending()
        table.on_message(AdapterChanged(1, "use_dora: not supported"))
        with pytest.raises(InvalidRequest, match="the adapter was not loaded: use_dora"):
            await loading
        assert table.names == ()

    run(scenario)


def test_only_paths_below_the_allowed_directories_are_loaded(tmp_path: Path) -> None:
    inside, outside = tmp_path / "allowed", tmp_path / "other"
    for directory in (inside / "deep" / "a", outside):
        directory.mkdir(parents=True)
    os.symlink(outside, inside / "link")
    os.symlink(inside / "deep" / "a", tmp_path / "back")
    table = AdapterTable("w", {}, [inside], Engine().send)
    allowed = [inside / "deep", inside / "deep" / "a", outside / ".." / "allowed" / "deep", tmp_path / "back"]
    refused = [inside, outside, inside / "link", inside / ".." / "other", f"{inside}er/a", "/", "", "a\0b", "x" * 9_000]
    assert [path for path in allowed if not table.may_load(str(path))] == []
    assert [path for path in refused if table.may_load(str(path))] == []
    with pytest.raises(InvalidRequest, match="adapter_dirs"):
        asyncio.run(table.load("sql", str(outside)))


def test_a_name_is_not_served_from_the_moment_it_is_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        table, engine = a_table(tmp_path, sql="a")
        unloaded = table.unload("sql")
        assert table.number("sql") is None  # before anything is awaited
        unloading = asyncio.create_task(unloaded)
        await run_pending()
        assert engine.sent == [UnloadAdapter(1)]
        with pytest.raises(NotFound):
            await table.unload("sql")
        assert not unloading.done()  # calls may still use it
        table.on_message(AdapterChanged(1))
        await unloading

    run(scenario)


def test_a_name_that_is_loaded_again_has_another_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        table, _ = a_table(tmp_path, sql="a")
        for work in (table.unload("sql"), table.load("sql", str(tmp_path / "b"))):
            task = asyncio.create_task(work)
            await run_pending()
            for number in (1, 2):
                table.on_message(AdapterChanged(number))
            await task
        assert table.number("sql") == 2

    run(scenario)


def test_a_new_process_loads_all_adapters_again_and_serves_no_broken_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, engine = a_table(tmp_path, sql="a", chat="b")
    table.engine_ready()
    assert engine.sent == [LoadAdapter(1, str(tmp_path / "a")), LoadAdapter(2, str(tmp_path / "b"))]
    table.on_message(AdapterChanged(1))
    table.on_message(AdapterChanged(2, "no adapter_config.json"))
    assert table.names == ("sql",)
    assert "did not load adapter chat: no adapter_config.json" in caplog.text


def test_a_lost_engine_ends_what_is_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        table, engine = a_table(tmp_path, sql="a")
        loading = asyncio.create_task(table.load("chat", str(tmp_path / "b")))
        unloading = asyncio.create_task(table.unload("sql"))
        await run_pending()
        table.engine_lost()
        with pytest.raises(NoWorker, match="lost"):
            await loading
        await unloading  # nothing holds it any more
        assert table.names == ()
        engine.is_up = False
        with pytest.raises(NoWorker, match="not running"):
            await table.load("chat", str(tmp_path / "b"))

    run(scenario)
