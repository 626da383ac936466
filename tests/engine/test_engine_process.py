"""The engine's loop and its process: messages, idling and ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from inferry.domain.lanes import Lane
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import (
    Abort,
    Aborted,
    Add,
    Fatal,
    Frames,
    FromEngine,
    Heartbeat,
    Ready,
    Rejected,
    Request,
    Shutdown,
    StepDone,
    ToEngine,
    decode_from_engine,
    frame,
    setup,
)
from inferry.engine.planner import Work
from inferry.engine.process import Channel, EngineLoop, PeerClosed
from support.engine_fixtures import FakeRunner, fake_output, greedy

CONFIG = EngineConfig(max_sequences=8, kv_tokens=4_096, chunk_tokens=64, block_tokens=4)


class Peer:
    """The gateway's end of the socket, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(120)
        self._frames = Frames()
        self._inbox: list[FromEngine] = []
        self.beats = 0

    def say(self, *messages: ToEngine) -> None:
        self.sock.sendall(b"".join(map(frame, messages)))

    def hear(self) -> FromEngine:
        """The next message that says more than that the process runs; `beats` counts those."""
        while not self._inbox:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            heard = [decode_from_engine(body) for body in self._frames.feed(data)]
            self._inbox += [message for message in heard if not isinstance(message, Heartbeat)]
            self.beats += len(heard) - len(self._inbox)
        return self._inbox.pop(0)


class Hosted:
    """An engine loop in a thread, with a fake model."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self.peer = Peer(ours)
        self.runner = FakeRunner(CONFIG)
        self.core = EngineCore(self.runner, CONFIG)
        self.ended_by: str | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            EngineLoop(self.core, Channel(self._theirs)).run()
            self.ended_by = "shutdown"
        except PeerClosed:
            self.ended_by = "hangup"

    def close(self) -> None:
        self.peer.sock.close()
        self.thread.join()
        self._theirs.close()


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    engine = Hosted()
    yield engine
    engine.close()


def test_tokens_and_the_end_come_step_by_step(hosted: Hosted) -> None:
    hosted.peer.say(Add([Request(7, [1, 2, 3], greedy(3), Lane.P1)]))
    steps = [hosted.peer.hear() for _ in range(3)]
    assert all(isinstance(step, StepDone) for step in steps)
    assert [step.tokens for step in steps if isinstance(step, StepDone)] == [
        [(7, token)] for token in fake_output([1, 2, 3], 3)
    ]
    last = steps[-1]
    assert isinstance(last, StepDone)
    assert [end.account.key for end in last.ends] == [7]
    assert last.stats.free_blocks == hosted.core.pool.total


def test_an_abort_that_arrives_during_a_step_takes_effect_before_the_next(hosted: Hosted) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def pause(work: Sequence[Work]) -> None:
        if work[0].sequence.output_tokens == 3:
            inside.set()
            assert go_on.wait(120)

    hosted.runner.before = pause
    hosted.peer.say(Add([Request(1, [1, 2], greedy(500), Lane.P1)]))
    assert inside.wait(120)
    hosted.peer.say(Abort(11, [1, 99]))
    go_on.set()
    heard: list[FromEngine] = []
    while not isinstance(message := hosted.peer.hear(), Aborted):
        heard.append(message)
    assert len(heard) == 4, "the step that was running when the abort came is the last"
    assert (message.call, [account.key for account in message.freed]) == (11, [1])
    assert message.freed[0].output_tokens == 4
    assert (message.stats.running, message.stats.free_blocks) == (0, hosted.core.pool.total)


def test_a_request_that_can_never_run_is_refused_by_its_key(hosted: Hosted) -> None:
    hosted.peer.say(Add([Request(5, [], greedy(), Lane.P1), Request(6, [1] * 2_000, greedy(), Lane.P1)]))
    refusals = [hosted.peer.hear(), hosted.peer.hear()]
    assert [(r.key, r.too_long) for r in refusals if isinstance(r, Rejected)] == [(5, False), (6, True)]


def test_shutdown_ends_the_loop_whatever_runs(hosted: Hosted) -> None:
    hosted.peer.say(Add([Request(1, [1, 2], greedy(900), Lane.P1)]), Shutdown())
    hosted.thread.join()
    assert hosted.ended_by == "shutdown"


def test_a_hangup_ends_the_loop_whatever_runs(hosted: Hosted) -> None:
    hosted.peer.say(Add([Request(1, [1, 2], greedy(900), Lane.P1)]))
    hosted.peer.hear()
    hosted.peer.sock.close()
    hosted.thread.join()
    assert hosted.ended_by == "hangup"


def test_messages_survive_any_fragmentation() -> None:
    sent = b"".join(frame(Abort(call, list(range(call)))) for call in range(50))
    frames = Frames()
    bodies = [body for byte in sent for body in frames.feed(bytes([byte]))]
    assert len(bodies) == 50
    assert b"".join(len(body).to_bytes(4, "little") + body for body in bodies) == sent


def spawn(sock: socket.socket) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "inferry.engine.process", str(sock.fileno())],
        pass_fds=[sock.fileno()],
        stderr=subprocess.PIPE,
    )


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_process_sleeps_when_idle_ignores_signals_of_the_group_and_ends_with_its_parent(tiny_dir: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn(theirs)
    with process, ours:
        peer = Peer(ours)
        peer.say(setup(tiny_dir, EngineConfig(kv_tokens=4_096, threads=1)))
        ready = peer.hear()
        assert isinstance(ready, Ready)
        assert (ready.context_tokens, ready.kv_tokens, ready.eos_ids) == (16_384, 4_096, [2])
        before = cpu_seconds(process.pid)
        for unwanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(unwanted)
        with pytest.raises(TimeoutError):
            ours.settimeout(0.3)
            peer.hear()
        assert cpu_seconds(process.pid) - before <= 0.1
        ours.settimeout(120)
        peer.say(Add([Request(1, [10, 11], greedy(2), Lane.P1)]))
        assert isinstance(peer.hear(), StepDone)
        assert peer.beats >= 1, "it says that it runs, also while it has nothing to do"
        ours.close()  # what the kernel does for a parent killed by SIGKILL
        assert process.wait(120) == 0


def test_a_model_that_cannot_be_loaded_is_fatal_with_a_reason(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn(theirs)
    with process, ours:
        peer = Peer(ours)
        peer.say(setup(tmp_path, EngineConfig()))
        fatal = peer.hear()
        assert isinstance(fatal, Fatal)
        assert "config.json" in fatal.message
        with pytest.raises(EOFError):
            peer.hear()


def test_a_kv_cache_that_does_not_fit_into_memory_is_fatal_with_the_difference(tiny_dir: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn(theirs)
    with process, ours:
        peer = Peer(ours)
        peer.say(setup(tiny_dir, EngineConfig(kv_tokens=1 << 40)))
        fatal = peer.hear()
        assert isinstance(fatal, Fatal)
        assert re.search(
            r"OutOfMemory: kv_tokens 1,099,511,627,776 need .* GiB more than the .* available", fatal.message
        )


def test_automatic_kv_tokens_are_reported_when_the_engine_is_ready(tiny_dir: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn(theirs)
    with process, ours:
        peer = Peer(ours)
        peer.say(setup(tiny_dir, EngineConfig(kv_tokens="auto", max_sequences=2, context_tokens=512, threads=1)))
        ready = peer.hear()
        assert isinstance(ready, Ready)
        assert ready.kv_tokens == 2 * 512
        peer.say(Shutdown())


PARENT = """
import asyncio, pathlib, sys
from inferry.workers.in_process.embedded import EmbeddedWorker
async def main():
    worker = EmbeddedWorker("w", model_dir=pathlib.Path(sys.argv[1]), models=["m"], make_assembler=lambda stop: None)
    await worker.start()
    print(worker.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_engine_dies_with_a_gateway_that_is_killed(tiny_dir: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tiny_dir)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        assert is_running(engine)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 120
    while is_running(engine):
        assert time.monotonic() < deadline
        os.sched_yield()
