"""`simulate`: from the command line to a table, JSON or a page."""

from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from inferry.sim.costs import CostModel, EngineFlags, EngineModel
from inferry.sim.report import Report
from inferry.sim_cli import simulate

app = typer.Typer()
app.command()(simulate)
runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    costs = CostModel(base_s=0.005, prefill_token_s=25e-6, sequence_s=20e-6, kv_token_s=30e-9)
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(EngineModel(name="m", costs=costs, flags=EngineFlags())))
    return path


SMALL = ["--scenario", "harbor", "--seconds", "6", "--digests", "5"]


def test_configurations_are_compared_with_each_other_and_with_going_direct(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "tight.yaml"
    config.write_text("workers:\n  - {name: a, kind: vllm, url: 'http://h', max_sequences: 64, prefill_tokens: 2048}\n")
    done = runner.invoke(app, [*SMALL, "--engine", str(model), "--config", str(config), "--direct", "--json"])
    assert done.exit_code == 0, done.output
    reports = msgspec.json.decode(done.stdout, type=list[Report])
    assert [one.arm for one in reports] == ["direct, first come first served", "direct, engine priority", "tight"]
    assert len({one.output_tokens for one in reports}) <= 3
    assert all(set(one.lanes) == {"P0", "P1", "P2"} for one in reports)


def test_a_table_and_a_page(tmp_path: Path, model: Path) -> None:
    page = tmp_path / "out.html"
    done = runner.invoke(app, [*SMALL, "--engine", str(model), "--plot", str(page)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "defaults" in done.stdout
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count("<svg") == 3
    assert "<script" not in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "either a --trace or a --scenario"),
        (["--scenario", "nowhere"], "no scenario"),
        (["--scenario", "harbor", "--plot", "x.gif"], ".html or .png"),
        (["--trace", "/does/not/exist.csv"], "cannot read"),
        (["--scenario", "harbor", "--engine", "/does/not/exist.json"], "engine model"),
    ],
)
def test_what_cannot_be_done_is_said_plainly(arguments: list[str], complaint: str) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2
    assert complaint in done.output
