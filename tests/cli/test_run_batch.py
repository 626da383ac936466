"""`inferry run-batch`: results in order, resumable, errors kept per line."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from inferry.cli import run_batch
from inferry.cli.batch_file import finished_results
from inferry.cli.main import app
from support.children import environment
from support.scripted_gateway import ScriptedGateway

CHAT = "/v1/chat/completions"


def a_line(number: int, **more: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": f"q{number}"}], "max_tokens": 3}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body, **more})


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run-batch", *map(str, arguments)])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "in.jsonl", tmp_path / "work" / "out.jsonl"


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_of_a_gateway_come_in_the_order_of_the_requests(tmp_path: Path, files: tuple[Path, Path]) -> None:
    requests, results = files
    requests.write_text("\n".join(a_line(number) for number in range(100)))
    with ScriptedGateway(tmp_path) as gateway:
        done = run(requests, results, "--url", gateway.url, "--concurrency", 8)
        assert done.exit_code == 0, done.output
        found = results_of(results)
        assert [one["custom_id"] for one in found] == [f"r{number}" for number in range(100)]
        assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in found} == {"one two three"}
        assert {job.lane.name for plan in gateway.worker.plans for job in plan.jobs if job.payload.body} >= {"P2"}


def test_errors_are_kept_per_line_and_the_exit_code_says_so(tmp_path: Path, files: tuple[Path, Path]) -> None:
    requests, results = files
    wrong = a_line(2, body={"model": "unknown", "messages": [{"role": "user", "content": "x"}]})
    requests.write_text("\n".join([a_line(1), wrong, "", "no request", a_line(4, url="/v1/completions"), a_line(5)]))
    with ScriptedGateway(tmp_path) as gateway:
        done = run(requests, results, "--url", gateway.url + "/v1")
    assert done.exit_code == 1, done.output
    found = results_of(results)
    assert [one["custom_id"] for one in found] == ["r1", "r2", None, "r4", "r5"]
    assert len({one["id"].rpartition("_")[0] for one in found}) == 1, "all lines name the same batch"
    assert found[1]["response"]["status_code"] == 404
    assert found[2]["error"]["code"] == "invalid_json_line"
    assert found[3]["error"]["code"] == "mismatched_endpoint"
    assert "5 results" in done.output
    assert "3 of them errors" in done.output


def test_a_second_run_continues_behind_the_results_that_are_there(tmp_path: Path, files: tuple[Path, Path]) -> None:
    requests, results = files
    requests.write_text("\n".join(a_line(number) for number in range(20)) + "\n")
    with ScriptedGateway(tmp_path) as gateway:
        assert run(requests, results, "--url", gateway.url).exit_code == 0
        complete = results.read_bytes()
        lines = complete.splitlines(keepends=True)
        results.write_bytes(b"".join(lines[:7]) + lines[7][:25])
        before = sum(len(plan.jobs) for plan in gateway.worker.plans)
        assert run(requests, results, "--url", gateway.url).exit_code == 0
        assert sum(len(plan.jobs) for plan in gateway.worker.plans) == before + 13
        assert results.read_bytes().splitlines()[:7] == [line.strip() for line in lines[:7]]
        assert [one["custom_id"] for one in results_of(results)] == [f"r{number}" for number in range(20)]
        assert run(requests, results, "--url", gateway.url).exit_code == 0
        assert sum(len(plan.jobs) for plan in gateway.worker.plans) == before + 13, "nothing is left to do"


def test_a_terminal_shows_the_results_of_all_and_other_output_has_no_bar(
    tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, results = files
    written = io.StringIO()

    def terminal(**_: Any) -> Console:
        return Console(file=written, force_terminal=True, width=100, _environ={"TERM": "xterm"})

    with ScriptedGateway(tmp_path) as gateway:
        requests.write_text("\n".join(a_line(number) for number in range(7)) + "\n")
        assert "7/7" not in run(requests, results, "--url", gateway.url).output
        requests.write_text("\n".join(a_line(number) for number in range(20)) + "\n")
        monkeypatch.setattr(run_batch, "Console", terminal)
        assert run(requests, results, "--url", gateway.url).exit_code == 0
    shown = re.findall(r"requests .*?(\d+)/(\d+)", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()))
    assert shown[0] == ("7", "20"), "earlier results count"
    assert shown[-1] == ("20", "20")
    done = [int(number) for number, _ in shown]
    assert done == sorted(done)


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"id": "batch_req_1", "custom_id": "another", "response": None}) + "\n",
        json.dumps({"id": "batch_req_1", "custom_id": None, "response": None}) + "\n",
        json.dumps({"id": "batch_req_1", "response": None}) + "\n",
        json.dumps({"custom_id": "r1", "note": "mine"}) + "\n",
        '["r1"]\n',
        "hello world, important notes\n",
        "hello world, important notes",
        "\n",
    ],
)
def test_a_file_with_other_lines_than_results_of_the_requests_is_left_as_it_is(
    files: tuple[Path, Path], line: str
) -> None:
    requests, results = files
    requests.write_text(a_line(1))
    results.write_text(line)
    done = run(requests, results, "--url", "http://127.0.0.1:9")
    assert done.exit_code == 2
    assert "has results of other requests" in done.output
    assert "name another file" in done.output
    assert results.read_text() == line


def test_more_results_than_requests_are_not_continued(files: tuple[Path, Path]) -> None:
    requests, results = files
    requests.write_text(a_line(1))
    found = "".join(json.dumps({"id": "x", "custom_id": name, "response": None}) + "\n" for name in ("r1", None))
    results.write_text(found)
    assert run(requests, results, "--url", "http://127.0.0.1:9").exit_code == 2
    assert results.read_text() == found


def test_a_result_without_custom_id_belongs_to_a_line_without_one(files: tuple[Path, Path]) -> None:
    requests, results = files
    requests.write_text("no request\n" + a_line(1))
    results.write_text(json.dumps({"id": "x", "custom_id": None, "response": None}) + "\n")
    assert finished_results(requests, results) == (1, 1)


def test_a_result_that_was_cut_off_is_removed(files: tuple[Path, Path]) -> None:
    requests, results = files
    requests.write_text(a_line(1))
    results.write_text('{"custom_id": "r1"')
    assert finished_results(requests, results) == (0, 0)
    assert results.read_bytes() == b""


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (a_line(1), ["--url", "http://127.0.0.1:9"], "cannot reach"),
        (a_line(1), ["--url", "ftp://x"], "must be of the form"),
        (a_line(1), ["--url", "http://127.0.0.1:9", "--config", "x.yaml"], "omit it"),
        ("{}", [], "has no `url`"),
        ("", [], "has no `url`"),
    ],
)
def test_what_cannot_run_exits_with_2(
    files: tuple[Path, Path], content: str, arguments: list[str], message: str
) -> None:
    requests, results = files
    requests.write_text(content)
    done = run(requests, results, *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_missing_requests_and_equal_files_are_refused(files: tuple[Path, Path]) -> None:
    requests, results = files
    assert run(requests, results).exit_code == 2
    requests.write_text(a_line(1))
    assert run(requests, requests).exit_code == 2


def test_requests_run_in_this_process_with_the_embedded_engine(
    tmp_path: Path, files: tuple[Path, Path], tiny_model: Path
) -> None:
    requests, results = files
    body = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    lines = [a_line(number, url="/v1/completions", body=body) for number in range(6)]
    requests.write_text("\n".join(lines))
    config = tmp_path / "c.yaml"
    worker = {"kind": "embedded", "name": "local", "model": str(tiny_model), "models": ["tiny"]}
    config.write_text(json.dumps({"workers": [worker]}))
    done = run(requests, results, "--config", config)
    assert done.exit_code == 0, done.output
    found = results_of(results)
    assert len({one["response"]["body"]["choices"][0]["text"] for one in found}) == 1
    assert [one["response"]["body"]["usage"]["completion_tokens"] for one in found] == [4] * 6


def test_an_interrupted_run_keeps_a_prefix_and_is_continued(tmp_path: Path, files: tuple[Path, Path]) -> None:
    requests, results = files
    requests.write_text("\n".join(a_line(number) for number in range(60)))
    with ScriptedGateway(tmp_path, pause_s=0.05) as gateway:
        command = [sys.executable, "-m", "inferry", "run-batch", str(requests), str(results), "--url", gateway.url]
        with subprocess.Popen([*command, "--concurrency", "4"], env=environment(), stderr=subprocess.PIPE) as first:
            end = time.monotonic() + 120
            while not results.exists() or results.read_bytes().count(b"\n") < 5:
                assert time.monotonic() < end
                time.sleep(0.01)
            first.send_signal(signal.SIGINT)
            _, told = first.communicate(timeout=120)
        assert first.returncode == 130, told
        assert b"the same command continues" in told
        kept = [one["custom_id"] for one in results_of(results)]
        assert 5 <= len(kept) < 60
        assert kept == [f"r{number}" for number in range(len(kept))]
        again = subprocess.run(command, env=environment(), capture_output=True, timeout=120, check=False)
        assert again.returncode == 0, again.stderr
        assert [one["custom_id"] for one in results_of(results)] == [f"r{number}" for number in range(60)]
