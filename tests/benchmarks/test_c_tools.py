"""The C programs of the benchmarks, built and run against each other for a fraction of a second."""

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import free_port, run_process, wait_for
from benchmarks.tools import Tools, build_tools

CALL = {"model": "m", "messages": [{"role": "user", "content": 'Say "stream": true.'}]}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    return build_tools(tmp_path_factory.mktemp("tools"))


@contextmanager
def mock_llm(tools: Tools, tokens: int = 16, itl_us: int = 0) -> Iterator[int]:
    port = free_port()
    with run_process([str(tools.mock_llm), str(port), str(tokens), str(itl_us)]) as process:
        wait_for(f"http://127.0.0.1:{port}/v1/models", process)
        yield port


def load(tools: Tools, port: int, body: Any, *headers: str, connections: int = 4, seconds: float = 0.3) -> Any:
    path = tools.directory / "body"
    path.write_text(json.dumps(body))
    program, target = str(tools.http_load), [f"{port}", "/v1/chat/completions"]
    command = [program, *target, f"{connections}", f"{seconds}", str(path), *headers]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def ask(connection: http.client.HTTPConnection, body: Any, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_whole_answers_are_counted_and_timed(tools: Tools) -> None:
    with mock_llm(tools) as port:
        figures = load(tools, port, CALL)
    assert figures["n"] > 100
    assert figures["rps"] == pytest.approx(figures["n"] / figures["seconds"], rel=0.01)
    assert figures["errors"] == figures["non200"] == figures["events_per_s"] == 0
    assert 0 < figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"]


def test_a_stream_has_an_event_per_token_and_two_more(tools: Tools) -> None:
    with mock_llm(tools, tokens=5) as port:
        figures = load(tools, port, CALL | {"stream": True})
    assert figures["errors"] == figures["non200"] == 0
    assert 7 * figures["n"] <= figures["events"] <= 7 * (figures["n"] + 4)
    assert figures["events_per_s"] == pytest.approx(figures["events"] / figures["seconds"], rel=0.01)
    assert figures["ttft_p50_ms"] <= figures["p50_ms"]


def test_a_paced_stream_takes_its_intervals(tools: Tools) -> None:
    with mock_llm(tools, tokens=4, itl_us=20_000) as port:
        figures = load(tools, port, CALL | {"stream": True}, connections=32)
    assert figures["errors"] == 0
    assert figures["n"] >= 32
    assert figures["p50_ms"] >= 60.0
    assert figures["ttft_p50_ms"] < figures["p50_ms"] - 40.0


def test_long_bodies_are_sent_and_read_whole(tools: Tools) -> None:
    long = {"model": "m", "messages": [{"role": "user", "content": "The invoice was charged twice. " * 13_000}]}
    with mock_llm(tools) as port:
        figures = load(tools, port, long, "x-inferry-lane: P2")
    assert figures["n"] > 4
    assert figures["errors"] == figures["non200"] == 0


def test_the_answers_are_those_of_an_openai_server(tools: Tools) -> None:
    with mock_llm(tools, tokens=3) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        status, body = ask(connection, CALL)
        whole = json.loads(body)
        assert (status, whole["choices"][0]["message"]["content"]) == (200, " word0 word1 word2")
        assert whole["usage"] == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
        status, body = ask(connection, CALL | {"stream": True})
        *chunks, last, end = [event.removeprefix("data: ") for event in body.decode().strip().split("\n\n")]
        assert end == "[DONE]"
        assert "".join(json.loads(one)["choices"][0]["delta"]["content"] for one in chunks) == " word0 word1 word2"
        assert json.loads(last)["usage"] == whole["usage"]
        assert ask(connection, {}, "/v1/nothing")[0] == 404
        connection.close()


def test_a_missing_server_is_an_error_and_no_figures(tools: Tools) -> None:
    (tools.directory / "body").write_text("{}")
    command = [str(tools.http_load), f"{free_port()}", "/", "1", "0.1", str(tools.directory / "body")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "connect" in done.stderr


def test_without_a_compiler_the_error_names_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SystemExit, match="found no `no-such-compiler`"):
        build_tools(tmp_path)
