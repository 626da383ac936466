"""`plan fleet`: how many workers, by simulation, from the command line."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from inferry.cli.plan import plan_app
from inferry.cli.plan_fleet import FleetPlan
from inferry.sim.costs import CostModel, EngineFlags, EngineModel


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An engine that computes 10,000 prompt tokens a second."""
    costs = CostModel(base_s=0.005, prefill_token_s=100e-6, sequence_s=20e-6, kv_token_s=30e-9)
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(EngineModel(name="an engine", costs=costs, flags=EngineFlags())))
    return path


def a_trace(directory: Path, per_s: int, seconds: int = 6, prompt: int = 1_000) -> Path:
    rows = "".join(f"{1000 * number / per_s:.1f},{prompt},8\n" for number in range(per_s * seconds))
    path = directory / "calls.csv"
    path.write_text(f"t_ms,input_tokens,output_tokens\n{rows}")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(plan_app, ["fleet", *map(str, arguments)], env={"COLUMNS": "140"})


def planned(*arguments: str | Path) -> FleetPlan:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(done.stdout, type=FleetPlan)


def test_a_load_of_several_engines_gets_exactly_as_many_workers(tmp_path: Path, model: Path) -> None:
    """35 prompts of 1,000 tokens a second are 3.5 engines' worth of prefill alone."""
    plan = planned("--trace", a_trace(tmp_path, per_s=35), "--model", model, "--slo", "P1=600,50")
    assert 4 <= plan.sizing.workers <= 6
    tried = {one.workers: one.meets for one in plan.sizing.probes}
    assert tried[plan.sizing.workers]
    assert not tried[plan.sizing.workers - 1]
    assert tried[plan.sizing.workers + 1]


def test_a_stricter_slo_needs_no_fewer_workers(tmp_path: Path, model: Path) -> None:
    trace = a_trace(tmp_path, per_s=30, seconds=4)
    easy, hard = (
        planned("--trace", trace, "--model", model, "--slo", f"P1={ttft},50").sizing.workers for ttft in (3000, 250)
    )
    assert easy <= hard


def test_the_busiest_stretch_is_what_it_is_sized_for(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "uneven.csv"
    quiet = [f"{number * 1000},500,8" for number in range(100)]
    burst = [f"{50_000 + number * 20},500,8" for number in range(100)]
    path.write_text("\n".join(["t_ms,input_tokens,output_tokens", *quiet, *burst]))
    plan = planned("--trace", path, "--model", model, "--calls", "100")
    assert plan.slice.calls == 100
    assert plan.slice.of_calls == 200
    assert plan.slice.seconds < 3
    assert plan.sizing.workers > 1
    assert planned("--trace", path, "--model", model, "--calls", "100", "--seconds", "50").sizing.workers == 1


def test_a_scenario_is_confirmed_over_three_seeds(model: Path) -> None:
    plan = planned("--scenario", "harbor", "--seconds", "6", "--digests", "5", "--model", model, "--target", "90")
    assert plan.sizing.seeds == (7, 8, 9)
    assert plan.sizing.chosen.seeds == (7, 8, 9)
    assert set(plan.sizing.chosen.attainment) == {"P0", "P1", "P2"}
    assert min(plan.sizing.chosen.attainment.values()) >= 0.9


def test_the_price_is_that_of_the_whole_fleet(tmp_path: Path, model: Path) -> None:
    plan = planned("--trace", a_trace(tmp_path, per_s=15), "--model", model, "--price-per-hour", "2.5")
    assert plan.cost is not None
    assert plan.cost.per_hour == 2.5 * plan.sizing.workers
    assert plan.cost.per_month == pytest.approx(730 * plan.cost.per_hour)
    tokens_an_hour = 3600 * plan.sizing.chosen.output_rate
    assert plan.cost.per_million_output_tokens == pytest.approx(plan.cost.per_hour / tokens_an_hour * 1e6)


def test_the_table_shows_every_probe_and_the_answer(tmp_path: Path, model: Path) -> None:
    done = run("--trace", a_trace(tmp_path, per_s=15), "--model", model, "--price-per-hour", "2")
    assert done.exit_code == 0, done.output
    assert "workers attain at least 99 % of the SLO targets" in done.stdout
    assert "sized for all 90 calls of calls.csv" in done.stdout
    assert "cost:" in done.stdout


def test_an_unattainable_slo_is_reported(tmp_path: Path, model: Path) -> None:
    done = run(
        "--trace", a_trace(tmp_path, per_s=5, seconds=2), "--model", model, "--slo", "P1=10,1", "--max-workers", "4"
    )
    assert done.exit_code == 2
    assert "4 workers do not attain 99 %" in done.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "either a --trace or a --scenario"),
        (["--scenario", "harbor", "--target", "0"], "--target must be"),
        (["--scenario", "harbor", "--price-per-hour", "0"], "--price-per-hour must be above 0"),
        (["--trace", "/does/not/exist.csv"], "cannot read"),
    ],
)
def test_invalid_plan_options_are_reported(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert complaint in done.output


def test_runs_pause_in_the_sized_fleet_where_the_configuration_says_so(tmp_path: Path) -> None:
    """Six sessions of three calls whose prompts do not fit the KV cache together."""
    costs = CostModel(base_s=0.005, prefill_token_s=1e-3, sequence_s=0.0, kv_token_s=0.0)
    model, trace = tmp_path / "engine.json", tmp_path / "sessions.jsonl"
    small = EngineModel(name="an engine", costs=costs, flags=EngineFlags(kv_tokens=3_072))
    model.write_bytes(msgspec.json.encode(small))
    shape = {"input_tokens": 1_280, "output_tokens": 8, "think_ms": 500, "hash_runs": [[0, 20]]}
    rows = [msgspec.json.encode({"session": f"s{run}", **shape}) for run in range(6) for _ in range(3)]
    trace.write_bytes(b"\n".join(rows))
    ttfts = []
    for pause in ("false", "true"):
        config = tmp_path / f"{pause}.yaml"
        config.write_text(f"workers: [{{kind: vllm, name: w, url: 'http://h'}}]\nsessions: {{pause: {pause}}}\n")
        workload = ("--trace", trace, "--session-gap-s", "0", "--model", model, "--config", config)
        plan = planned(*workload, "--target", "0.1", "--slo", "P1=100000,100000", "--max-workers", "1")
        ttfts.append(plan.sizing.probes[0].output_rate)
    assert ttfts[0] != ttfts[1]
