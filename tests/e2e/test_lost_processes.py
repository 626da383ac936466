"""Processes of one gateway that are killed or stopped while clients read."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.several_processes import Answered, EngineThread, Processes, a_body, expected_text, processes
from support.waiting import until

TOKENS = 40


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Processes, EngineThread]]:
    with processes(tmp_path, {"server": {"drain_timeout_s": 100}}) as found:
        yield found


def _begin_streams(gateway: Processes, engine: EngineThread, count: int = 24, **more: object) -> list[Answered]:
    """Streams through all processes, each paused after its first tokens."""
    engine.hold(5)
    calls = [gateway.begin(a_body(number, TOKENS, stream=True, **more)) for number in range(count)]
    until(lambda: all(one.text for one in calls))
    assert len({one.process for one in calls}) == gateway.processes
    return calls


def _lost(calls: list[Answered]) -> list[Answered]:
    """The calls of the process that has died, once all of them have ended."""
    until(lambda: any(one.error for one in calls))
    process = next(one.process for one in calls if one.error is not None)
    lost = [one for one in calls if one.process == process]
    until(lambda: all(one.error for one in lost))
    return lost


def test_sigterm_lets_every_stream_end(running: tuple[Processes, EngineThread]) -> None:
    gateway, engine = running
    calls = _begin_streams(gateway, engine)
    os.kill(gateway.pid, signal.SIGTERM)
    until(lambda: gateway.whole_log().count("draining:") == gateway.processes)
    engine.open()
    until(lambda: all(one.status for one in calls))
    for number, one in enumerate(calls):
        assert one.text == expected_text(a_body(number, TOKENS))
        assert one.body.endswith(b"data: [DONE]\n\n")
    assert gateway.wait() == 0


def test_a_killed_ingress_process_leaves_nothing_and_is_restarted(running: tuple[Processes, EngineThread]) -> None:
    gateway, engine = running
    calls = _begin_streams(gateway, engine)
    os.kill(gateway.pid_of("ingress-2"), signal.SIGKILL)
    lost = _lost(calls)
    until(lambda: engine.running == len(calls) - len(lost))
    engine.open()
    until(lambda: all(one.status for one in calls if one not in lost))
    for number, one in enumerate(calls):
        assert one in lost or one.text == expected_text(a_body(number, TOKENS))
    until(gateway.is_empty)
    gateway.until(lambda: gateway.whole_log().count("worker owner is ready") == gateway.processes, 120)
    before = {one.process for one in calls}
    until(lambda: gateway.call("POST", "/v1/completions", a_body(tokens=2)).process not in before)


def test_streams_of_a_killed_owner_continue_where_they_were(running: tuple[Processes, EngineThread]) -> None:
    gateway, engine = running
    calls = _begin_streams(gateway, engine)
    owner = gateway.pid_of("owner")
    os.kill(owner, signal.SIGKILL)
    lost = _lost(calls)  # clients of the owner's own connections
    engine.open()
    late = [gateway.begin(a_body(number, 6)) for number in range(12)]
    until(lambda: all(one.status or one.error for one in (*calls, *late)))
    for number, one in enumerate(calls):
        if one not in lost:
            assert one.error is None
            assert one.text == expected_text(a_body(number, TOKENS)), one.events[-1]
            assert one.body.endswith(b"data: [DONE]\n\n")
            assert one.events[0]["id"] == one.events[-1]["id"]
    for number, one in enumerate(late):
        assert one.json["choices"][0]["text"] == expected_text(a_body(number, 6))
    assert gateway.pid_of("owner") != owner
    until(gateway.is_empty)


def test_a_stream_that_cannot_continue_ends_with_an_error_in_band(running: tuple[Processes, EngineThread]) -> None:
    gateway, engine = running
    calls = _begin_streams(gateway, engine, logprobs=1)
    os.kill(gateway.pid_of("owner"), signal.SIGKILL)
    until(lambda: all(one.status or one.error for one in calls))
    ended = [one for one in calls if one.error is None]
    assert ended
    for one in ended:
        assert one.events[-1]["error"]["code"] == "worker_lost"
        assert not one.body.endswith(b"data: [DONE]\n\n")


def test_processes_end_when_their_supervisor_is_killed(running: tuple[Processes, EngineThread]) -> None:
    gateway, _ = running
    pids = [gateway.pid_of(name) for name in ("owner", "ingress-1", "ingress-2", "ingress-3")]
    os.kill(gateway.pid, signal.SIGKILL)
    gateway.wait()
    until(lambda: not any(_is_alive(pid) for pid in pids))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
