"""The pool follows the workers file."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from inferry.dispatch.pool import Pool
from inferry.dispatch.workers_file import InvalidWorkersFile, WatchedFile, WorkerReconciler, WorkersFileWatcher
from inferry.domain.clock import SystemClock
from inferry.domain.ports import Worker
from inferry.domain.workers import Phase
from support.scripted_worker import ScriptedWorker


class Following:
    """A pool that follows a file of lines `name version`; a version called `bad` cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: list[ScriptedWorker] = []
        self.pool = Pool([], SystemClock())
        self.fleet: WorkerReconciler[tuple[str, str]] = WorkerReconciler(self.pool, self._make, {}, grace_s=60.0)
        self.watch = WorkersFileWatcher(WatchedFile(path), self._read, self.fleet)

    def write(self, text: str) -> None:
        """As careful writers do."""
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        os.replace(beside, self.path)

    async def follow(self, text: str | None = None) -> list[str]:
        if text is not None:
            self.write(text)
        await self.watch.poll()
        await self.fleet.wait_settled()
        return self.versions()

    def versions(self) -> list[str]:
        return sorted(" ".join(card.name for card in self._of(name).cards()) for name in self.pool.names())

    def _of(self, name: str) -> Worker:
        worker = self.pool.worker(name)
        assert worker is not None
        return worker

    async def _make(self, entry: tuple[str, str]) -> tuple[Worker, str]:
        name, version = entry
        if version == "bad":
            raise InvalidWorkersFile(f"{name}: bad")
        worker = ScriptedWorker(name, models=(f"{name}:{version}",))
        self.made.append(worker)
        return worker, "scripted"

    @staticmethod
    def _read(content: bytes) -> dict[str, tuple[str, str]]:
        lines = [tuple(line.split()) for line in content.decode().splitlines()]
        if any(len(line) != 2 for line in lines):
            raise InvalidWorkersFile("a line has two words")
        return {name: (name, version) for name, version in lines}


def run(tmp_path: Path, scenario: Callable[[Following], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        following = Following(tmp_path / "workers")
        following.pool.start()
        try:
            async with asyncio.timeout(120):
                await scenario(following)
        finally:
            await following.watch.close()
            await following.pool.close()

    asyncio.run(whole())


def test_workers_come_go_and_are_replaced_as_the_file_says(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        assert await it.follow("a 1\nb 1\n") == ["a:1", "b:1"]
        kept = it.pool.worker("a")
        assert await it.follow("a 1\nc 1\n") == ["a:1", "c:1"]
        assert it.pool.worker("a") is kept
        assert await it.follow("c 2\na 1\n") == ["a:1", "c:2"]
        assert it.pool.worker("a") is kept
        assert len(it.made) == 4
        assert await it.follow("") == []
        assert [worker.phase for worker in it.made] == [Phase.DOWN] * 4

    run(tmp_path, scenario)


@pytest.mark.parametrize("broken", ["a 1\nb\n", "a 1\nc bad\n", "a bad\nd 1\n"])
def test_an_invalid_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(it: Following) -> None:
        assert await it.follow("a 1\nb 1\n") == ["a:1", "b:1"]
        for _ in range(3):
            assert await it.follow(broken) == ["a:1", "b:1"]
        complaints = [record for record in caplog.records if "is invalid" in record.message]
        assert len(complaints) == 1
        assert str(it.path) in complaints[0].message
        assert await it.follow("b 1\n") == ["b:1"]

    run(tmp_path, scenario)


def test_a_deleted_file_removes_no_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Following) -> None:
        await it.follow("a 1\n")
        it.path.unlink()
        for _ in range(3):
            assert await it.follow() == ["a:1"]
        assert caplog.text.count("No such file") == 1
        assert await it.follow("a 2\n") == ["a:2"]

    run(tmp_path, scenario)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (replace_by_fifo, "not a regular file"),
        (replace_by_directory, "not a regular file"),
        (replace_by_device, "not a regular file"),
        (replace_by_huge_file, "larger than 1048576 bytes"),
    ],
)
def test_only_a_regular_file_of_bounded_size_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replace: Callable[[Path], None], message: str
) -> None:
    async def scenario(it: Following) -> None:
        await it.follow("a 1\n")
        replace(it.path)
        for _ in range(3):
            assert await it.follow() == ["a:1"]
        assert caplog.text.count(message) == 1
        if it.path.is_dir():
            it.path.rmdir()
        assert await it.follow("a 2\n") == ["a:2"]

    run(tmp_path, scenario)


def test_a_worker_that_takes_long_to_drain_holds_up_only_its_successor(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        await it.follow("slow 1\nquick 1\n")
        busy = True
        it.pool.in_flight = lambda name: int(busy and name == "slow")
        it.write("slow 2\nquick 2\nnew 1\n")
        await it.watch.poll()
        while it.versions() != ["new:1", "quick:2", "slow:1"]:
            await asyncio.sleep(0.01)
        it.write("slow 3\nquick 2\nnew 1\n")
        await it.watch.poll()
        assert it.pool.view("slow").phase in (Phase.DRAINING, Phase.STARTING)
        busy = False
        it.pool._get("slow").job_ended.set()
        await it.fleet.wait_settled()
        assert it.versions() == ["new:1", "quick:2", "slow:3"]

    run(tmp_path, scenario)


def test_the_watcher_polls_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferry.dispatch.workers_file.POLL_INTERVAL_S", 0.01)

    async def scenario(it: Following) -> None:
        it.watch.start()
        it.write("a 1\n")
        while it.versions() != ["a:1"]:
            await asyncio.sleep(0.01)

    run(tmp_path, scenario)


def test_a_file_is_read_again_only_when_something_about_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    long_ago = time.time() - 100
    os.utime(path, (long_ago, long_ago))
    file = WatchedFile(path)
    assert file.poll() == b"one"
    assert file.poll() is None
    path.write_bytes(b"two")
    assert file.poll() == b"two"
    path.write_bytes(b"six")  # the same size, and within the same tick of the clock as far as anybody can tell
    assert file.poll() == b"six"
    os.utime(path)
    assert file.poll() is None
    file.forget()
    assert file.poll() == b"six"
