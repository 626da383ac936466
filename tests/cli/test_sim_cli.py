"""`inferry simulate`: tables, JSON, HTML pages and plots."""

import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from inferry.cli.simulate import SimulationResult, simulate
from inferry.sim.costs import CostModel, EngineFlags, EngineModel

app = typer.Typer()
app.command()(simulate)
runner = CliRunner()

SMALL = ["--scenario", "harbor", "--seconds", "6", "--digests", "5"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    costs = CostModel(base_s=0.005, prefill_token_s=25e-6, sequence_s=20e-6, kv_token_s=30e-9)
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(EngineModel(name="an engine", costs=costs, flags=EngineFlags())))
    return path


def a_config(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def a_trace(directory: Path, calls: int = 40, spacing_ms: int = 50) -> Path:
    rows = "".join(f"{number * spacing_ms},{200 + number},12\n" for number in range(calls))
    return a_config(directory, "calls.csv", f"t_ms,input_tokens,output_tokens\n{rows}")


def run(*arguments: str | Path, columns: int = 160) -> Result:
    return runner.invoke(app, list(map(str, arguments)), env={"COLUMNS": str(columns)})


def simulated(*arguments: str | Path) -> SimulationResult:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(done.stdout, type=SimulationResult)


def test_configurations_are_compared_with_each_other_and_with_direct(tmp_path: Path, model: Path) -> None:
    tight = a_config(
        tmp_path,
        "tight.yaml",
        "workers:\n  - {name: a, kind: vllm, url: 'http://h', max_sequences: 4, prefill_tokens: 2048}\n",
    )
    wide = a_config(tmp_path, "wide.yaml", "workers:\n  - {name: a, kind: vllm, url: 'http://h'}\n")
    result = simulated(*SMALL, "--model", model, "--config", tight, "--config", wide, "--direct")
    assert [arm.arm for arm in result.arms] == [
        "direct, fcfs",
        "direct, priority",
        "tight",
        "wide",
    ]
    assert all(set(arm.lanes) == {"P0", "P1", "P2"} for arm in result.arms)
    tokens = {arm.reports[0].output_tokens for arm in result.arms}
    assert max(tokens) - min(tokens) < 0.05 * max(tokens)  # only runs that walk away get less from a slower arm
    by_name = {arm.arm: arm for arm in result.arms}
    assert by_name["tight"].over_seeds["wall_s"].median > by_name["wide"].over_seeds["wall_s"].median


def test_several_seeds_give_medians_and_ranges(model: Path) -> None:
    result = simulated(*SMALL, "--model", model, "--seed", "1", "--seed", "2", "--seed", "3")
    (arm,) = result.arms
    assert [one.seed for one in arm.reports] == [1, 2, 3]
    walls = sorted(one.wall_s for one in arm.reports)
    spread = arm.over_seeds["wall_s"]
    assert (spread.low, spread.median, spread.high) == tuple(walls)
    ttft = arm.lanes["P1"]["ttft_p95"]
    assert ttft.low < ttft.high
    table = run(*SMALL, "--model", model, "--seed", "1", "--seed", "2", columns=80).stdout
    assert "min" in table
    assert "max" in table
    assert "…" not in table
    assert "seeds 1, 2" in table


def test_the_workers_of_a_configuration_are_the_workers_of_its_arm(tmp_path: Path, model: Path) -> None:
    config = a_config(
        tmp_path,
        "three.yaml",
        "workers:\n"
        "  - {name: a, kind: vllm, url: 'http://h'}\n"
        "  - {name: b, kind: vllm, url: 'http://i', group: batch}\n"
        "  - {name: c, kind: embedded, max_sequences: 4, kv_tokens: 40000}\n",
    )
    assert simulated(*SMALL, "--model", model, "-c", config).arms[0].reports[0].workers == 3
    assert simulated(*SMALL, "--model", model, "-c", config, "--workers", "5").arms[0].reports[0].workers == 5


def test_more_workers_serve_sooner(model: Path) -> None:
    one, four = (
        simulated(*SMALL, "--model", model, "--workers", count).arms[0].lanes["P1"]["ttft_p95"].median
        for count in ("1", "4")
    )
    assert four < one


def test_calls_that_no_engine_can_hold_are_left_out_and_counted(tmp_path: Path, model: Path) -> None:
    small = a_config(tmp_path, "small.yaml", "workers:\n  - {kind: embedded, kv_tokens: 256, chunk_tokens: 64}\n")
    result = simulated("--trace", a_trace(tmp_path, calls=60), "--model", model, "-c", small)
    # 200 + number prompt tokens and 12 of output: the first 45 fit into 256.
    assert (result.runs, result.left_out) == (45, 15)


def test_a_trace_is_played_faster_by_its_scale(tmp_path: Path, model: Path) -> None:
    trace = a_trace(tmp_path)
    plain, doubled = (
        simulated("--trace", trace, "--model", model, "--scale", scale).arms[0].reports[0].wall_s for scale in "12"
    )
    assert doubled == pytest.approx(plain / 2, rel=0.1)


def test_the_runs_of_a_trace_can_be_dealt_out_over_lanes_by_seed(tmp_path: Path, model: Path) -> None:
    trace = a_trace(tmp_path, calls=100)
    result = simulated("--trace", trace, "--model", model, "--lane", "P0=0.5,P2=0.5", "--seed", "1", "--seed", "2")
    counts = [{name: lane.calls for name, lane in one.lanes.items()} for one in result.arms[0].reports]
    assert all(set(one) == {"P0", "P2"} and sum(one.values()) == 100 for one in counts)
    assert counts[0] != counts[1]


def test_slo_targets_come_from_the_first_configuration_or_the_command_line(tmp_path: Path, model: Path) -> None:
    config = a_config(tmp_path, "a.yaml", "lanes:\n  P1: {ttft_ms: 1500, itl_ms: 40}\n")
    result = simulated(*SMALL, "--model", model, "-c", config, "--slo", "P0=1,1")
    assert result.slo_targets["P1"].ttft_s == 1.5
    assert result.slo_targets["P2"].ttft_s == 90.0
    assert result.arms[0].lanes["P0"]["attainment"].median == 0.0


def test_a_table_a_page_and_plots(tmp_path: Path, model: Path) -> None:
    plots = tmp_path / "plots"
    done = run(*SMALL, "--model", model, "--direct", "--seed", "1", "--seed", "2", "--plots", plots)
    assert done.exit_code == 0, done.output
    for heading in ("SLO", "ttft p50", "p99", "itl p95", "good/s", "fair", "busy", "done"):
        assert heading in done.stdout
    assert "SLO targets: P0 TTFT 500 ms" in done.stdout
    page = (plots / "index.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 6  # attainment, first tokens of three lanes, waiting, running
    assert "<script" not in page
    assert "nan" not in page.lower().replace("tenant", "")
    for name in ("attainment.png", "first-tokens.png", "open-calls.png"):
        assert (plots / name).read_bytes().startswith(PNG)


def test_without_matplotlib_the_extra_is_named_and_a_page_can_still_be_had(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run(*SMALL, "--model", model, "--plots", tmp_path / "plots")
    assert done.exit_code == 2
    assert "pip install 'inferry[plots]'" in done.output
    page = tmp_path / "page.html"
    assert run(*SMALL, "--model", model, "--html", page).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_the_shipped_model_is_used_where_none_is_named() -> None:
    assert "H200" in simulated("--scenario", "harbor", "--seconds", "2", "--digests", "0").model


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "either a --trace or a --scenario"),
        (["--scenario", "nowhere"], "unknown scenario"),
        (["--scenario", "harbor", "--scale", "0"], "--scale must be above 0"),
        (["--scenario", "harbor", "--lane", "P9"], "--lane must be"),
        (["--scenario", "harbor", "--slo", "P0=fast"], "--slo must be of the form"),
        (["--trace", "/does/not/exist.csv"], "cannot read"),
        (["--scenario", "harbor", "--model", "/does/not/exist.json"], "engine model"),
        (["--scenario", "harbor", "--config", "/does/not/exist.yaml"], "cannot read"),
    ],
)
def test_invalid_simulation_options_are_reported(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert complaint in done.output


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    trace = a_config(tmp_path, "bad.csv", "t_ms,input_tokens,output_tokens\n0,10,5\n5,many,5\n")
    done = run("--trace", trace, columns=300)
    assert done.exit_code == 2
    assert "bad.csv, line 3: input_tokens: expected `int`" in done.output


def test_a_trace_in_one_lane_has_one_seed(tmp_path: Path) -> None:
    done = run("--trace", a_trace(tmp_path), "--seed", "1", "--seed", "2")
    assert done.exit_code == 2
    assert "the same for every seed" in done.output


def test_the_calls_of_a_lost_engine_are_retried_behind_the_gateway_and_fail_without(model: Path) -> None:
    small: list[str | Path] = [
        "--scenario",
        "simple-harbor",
        "--seconds",
        "6",
        "--digests",
        "5",
        "--model",
        model,
        "--workers",
        "2",
    ]
    direct, _, gateway = simulated(*small, "--direct", "--kill", "2@2").arms
    assert direct.reports[0].lanes["P1"].failed > 0
    assert all(lane.failed == 0 for lane in gateway.reports[0].lanes.values())


def test_expected_lengths_decide_what_is_sent_where_kv_is_scarce(tmp_path: Path, model: Path) -> None:
    config = a_config(tmp_path, "c.yaml", "workers:\n  - {name: a, kind: vllm, url: 'http://h', kv_tokens: 12000}\n")
    told, predicted = (
        simulated(*SMALL, "--model", model, "--config", config, "--lengths", source).arms[0].reports[0]
        for source in ("true", "predicted")
    )
    assert told.lanes["P2"].ttft_p95 != predicted.lanes["P2"].ttft_p95


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        (["2"], "must be of the form ENGINE@SECONDS"),
        (["x@3"], "must be of the form ENGINE@SECONDS"),
        (["3@1"], "must name an engine from 1 to 2"),
        (["1@-1"], "a time of 0 s or more"),
        (["1@1", "2@3"], "must leave an engine"),
    ],
)
def test_an_engine_that_cannot_be_lost_is_reported(model: Path, kills: list[str], words: str) -> None:
    options = [word for kill in kills for word in ("--kill", kill)]
    done = run(*SMALL, "--model", model, "--workers", "2", *options)
    assert done.exit_code == 2
    assert words in done.output


def test_sessions_are_a_closed_loop_whose_speed_is_that_of_the_service(tmp_path: Path, model: Path) -> None:
    trace = a_trace(tmp_path, calls=400, spacing_ms=60_000)
    slow, fast = (
        simulated("--trace", trace, "--model", model, "--sessions", sessions).arms[0].reports[0]
        for sessions in ("1", "4")
    )
    assert slow.calls == fast.calls == 400
    assert 2 * fast.wall_s < slow.wall_s < 60.0


def test_fewer_runs_than_sessions_begin_at_once(tmp_path: Path, model: Path) -> None:
    result = simulated("--trace", a_trace(tmp_path, calls=3), "--model", model, "--sessions", "50")
    assert result.arms[0].reports[0].calls == 3
