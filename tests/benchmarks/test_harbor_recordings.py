"""A recorded comparison gives the load generator's figures again, and the reasons of late calls."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harbor_h200
from benchmarks.harbor_costs import Counts, counts, learned_costs
from benchmarks.harbor_figures import attained, differences, figures
from benchmarks.harbor_misses import (
    BATCH_PROMPTS,
    COSTS_UNKNOWN,
    LIVE_PROMPTS,
    PROMPT_COST_DIP,
    RECOVERY,
    misses,
    summary,
)
from benchmarks.harbor_record import Belief, Call, Recording, beliefs, read, to_recording, write
from benchmarks.harbor_simulator import PromptMemoryFrontend, simulate_seed
from benchmarks.result_files import RESULTS
from inferry.dispatch.capacity import CapacityTracker
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.values import replace
from inferry.sim.harbor import harbor
from support.builders import a_view

SEED = 5
RUNS = {run.run_id: run for run in harbor(SEED)}
BEGAN = 1234.5
"""The yardstick's clock."""


def played(first_s: float = 0.1, itl_s: float = 0.01, stall: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """Rows as the yardstick writes them: every call alike, except that runs named in `stall` stop before their second
    token.
    """
    rows = []
    for run in RUNS.values():
        at = run.at
        for step in run.steps:
            late = (stall or {}).get(run.run_id, 0.0)
            times = [first_s + itl_s * number + (late if number else 0.0) for number in range(step.output)]
            row = {
                "run": run.run_id,
                "lane": run.lane.name,
                "tenant": run.tenant,
                "step": step.name,
                "resets": 0,
                "at": BEGAN + at,
                "times": times,
                "out": step.output,
                "ok": True,
                "err": None,
                "end": times[-1],
            }
            rows.append(row)
            if run.cancel_after_s is not None and at + times[-1] + step.tool_s > run.at + run.cancel_after_s:
                row |= {"ok": False, "err": "cancelled", "out": 0, "times": times[:1], "end": times[0]}
                break
            at += times[-1] + step.tool_s
    return rows


def first_of(lane: Lane, after_s: float) -> str:
    """The first run of the lane after that moment whose agent stays."""
    stays = [run for run in RUNS.values() if run.lane is lane and run.at > after_s and run.cancel_after_s is None]
    return min(stays, key=lambda run: run.at).run_id


def a_call(*deltas_ms: int, lane: str = "P0", out: int | None = None, ok: bool = True) -> Call:
    produced = len(deltas_ms) if out is None else out
    return Call("r", "s", lane, "t", 0, produced, ok, None, produced, 0, sum(deltas_ms), deltas_ms)


def believing(*prompt_us: float) -> tuple[Belief, ...]:
    """One belief a second."""
    return tuple(Belief(float(s), 4096, None, None, 5.0, 100.0, us, None, None, 10) for s, us in enumerate(prompt_us))


@pytest.mark.parametrize(
    ("call", "is_attained"),
    [
        (a_call(500, 30, 30), True),
        (a_call(501, 10), False),
        (a_call(100, 430), True),
        (a_call(100, 431), False),
        (a_call(100, 430, ok=False), False),
        (a_call(ok=False), False),
        # Two tokens in each event: the second event brings what is due after two gaps.
        (a_call(500, 60, out=4), True),
        (a_call(500, 61, out=4), False),
        (a_call(2000, 50, lane="P1"), True),
    ],
)
def test_an_slo_is_attained_when_no_token_is_late(call: Call, is_attained: bool) -> None:
    assert attained(call) is is_attained


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    recording = to_recording(played()[:50], "direct", SEED)
    write(tmp_path / "direct_5.json.xz", recording)
    assert read(tmp_path / "direct_5.json.xz") == recording
    assert harbor_h200.recordings(tmp_path) == [recording]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.json.xz", Recording(format="other/2", arm="direct", seed=SEED, attempt=1, calls=()))
    with pytest.raises(ValueError, match="other/2"):
        read(tmp_path / "x.json.xz")


def test_rows_of_another_seed_are_refused() -> None:
    with pytest.raises((ValueError, KeyError, IndexError)):
        to_recording(played(), "direct", SEED + 1)


def test_times_are_rounded_up_so_that_late_stays_late() -> None:
    rows = played()
    rows[0]["times"][:2] = [0.5, 0.5300001]
    call = to_recording(rows, "direct", SEED).calls[0]
    assert call.times_ms[:2] == [500, 531]


def test_runs_that_were_left_plan_nothing_and_late_calls_count_against_the_lane() -> None:
    late = first_of(Lane.P0, 0)
    computed = figures(to_recording(played(stall={late: 2.0}), "direct", SEED))
    stays = [run for run in RUNS.values() if run.lane is Lane.P0 and run.cancel_after_s is None]
    left = computed["P0"]["cancelled"]
    assert left > 0
    assert computed["P0"]["planned"] >= sum(len(run.steps) for run in stays)
    missed = sum(step.output > 1 for step in RUNS[late].steps)
    whole = sum(row["lane"] == "P0" and row["err"] is None for row in played())
    assert computed["P0"]["slo"] == round(min(1.0, (whole - missed) / computed["P0"]["planned"]), 4)
    assert computed["P1"]["slo"] == 1.0
    assert computed["failed"] == 0


def test_figures_that_differ_are_named() -> None:
    computed = figures(to_recording(played(), "direct", SEED))
    assert differences(computed, computed) == []
    worse = {**computed, "P1": {**computed["P1"], "slo": 0.5, "gap_p50": computed["P1"]["gap_p50"] + 0.001}}
    assert differences(computed, worse) == ["P1 slo: 1.0 here, 0.5 printed"]


@pytest.mark.parametrize(
    ("after_s", "prompt_us", "cause"),
    [
        (20, [23.0] * 60, LIVE_PROMPTS),
        (2, [23.0] * 60, COSTS_UNKNOWN),
        (20, [23.0] * 18 + [5.0] * 12 + [23.0] * 40, PROMPT_COST_DIP),
        (20, [23.0] * 5 + [5.0] * 11 + [23.0] * 40, RECOVERY),
    ],
)
def test_a_late_call_is_laid_to_what_was_in_its_way(after_s: float, prompt_us: list[float], cause: str) -> None:
    late = first_of(Lane.P0, after_s)
    rows = [row for row in played(stall={late: 1.0}) if row["run"] == late]
    recording = replace(to_recording(rows, "inferry", SEED), beliefs=believing(*prompt_us))
    found = next(misses(recording))
    assert found.cause == cause
    assert found.late_token == 1
    assert summary(recording)["causes"][cause] >= 1


def test_batch_prompts_beside_a_late_call_are_named() -> None:
    late = first_of(Lane.P0, 20)
    digest = next(run_id for run_id in RUNS if run_id.startswith("digest"))
    rows = [row for row in played(stall={late: 1.0}) if row["run"] in (late, digest)]
    for row in rows:
        if row["run"] == digest:  # it waited long: its first token comes while the other one stalls
            row["times"] = [BEGAN + RUNS[late].at + 0.5 - row["at"] + time for time in row["times"]]
    found = next(misses(to_recording(rows, "inferry", SEED)))
    assert found.cause == BATCH_PROMPTS
    assert found.batch_part == 1.0


def test_controller_state_is_parsed_from_a_gateway_log() -> None:
    log = [
        "2026-01-01 23:59:59,500 INFO inferry: starting 1 worker",
        "2026-01-01 23:59:59,900 DEBUG inferry.dispatch.loop: worker gpu: Capacity(sequences=256, kv_tokens=8, "
        "prefill_tokens=4096, prefill_tokens_per_s=None, batch_sequences=None), a step 0.00 ms, a token 0 us, "
        "a prompt token 0.0 us, least slack P0 inf P1 inf P2 inf, 0 jobs",
        "2026-01-02 00:00:00,900 DEBUG inferry.dispatch.loop: worker gpu: Capacity(sequences=256, kv_tokens=8, "
        "prefill_tokens=8409, prefill_tokens_per_s=15958.8, batch_sequences=230), a step 9.20 ms, a token 40 us, "
        "a prompt token 24.0 us, least slack P0 0.15 P1 1.72 P2 inf, 85 jobs",
    ]
    assert beliefs(log) == [
        Belief(0.0, 4096, None, None, 0.0, 0.0, 0.0, None, None, 0),
        Belief(1.0, 8409, 15959, 230, 9.2, 40.0, 24.0, 0.15, 1.72, 85),
    ]


def test_the_log_of_this_gateway_can_be_read() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    tracker.update_view(replace(a_view(), controlled=True), now=0.0)
    (line,) = tracker.describe()
    assert len(beliefs([f"2026-01-01 00:00:00,000 DEBUG inferry.dispatch.loop: {line}"])) == 1


def test_costs_are_learned_again_from_what_was_recorded() -> None:
    """An engine of 6 ms a step, 0.1 ms a sequence and 20 us a prompt token, with prompts and sequences that vary."""
    rng = random.Random(2)
    at_s, steps_s, tokens_s, prompts_s, prompt_tokens = 0.0, [], [], [], [0]
    sequences = 20
    while at_s < 25:
        sequences = max(5, min(120, sequences + rng.randint(-8, 8)))
        prompt = rng.choice((0, 0, 200, 1500))
        at_s += 0.006 + 0.0001 * sequences + 20e-6 * prompt
        steps_s.append(at_s)
        tokens_s += [at_s] * sequences
        if prompt:
            prompts_s.append(at_s)
            prompt_tokens.append(prompt_tokens[-1] + prompt)
    *_, (_, costs) = learned_costs(Counts(steps_s, tokens_s, prompts_s, prompt_tokens), phase_s=0.2, until_s=25)
    assert costs.prompt_s == pytest.approx(20e-6, rel=0.15)
    assert costs.step_s(60) == pytest.approx(0.012, rel=0.15)


def test_steps_are_counted_where_tokens_come_together() -> None:
    rows = [row for row in played(first_s=0.1, itl_s=0.02) if row["run"] == first_of(Lane.P0, 3)][:1]
    update_view = counts(to_recording([*rows], "direct", SEED))
    assert len(update_view.steps_s) == len(update_view.tokens_s) == rows[0]["out"]
    assert update_view.by(1e9)[2] == sum(piece[2] for piece in RUNS[rows[0]["run"]].steps[0].prompt)


def test_a_target_that_is_missed_is_named() -> None:
    direct = {**figures(to_recording(played(), "direct", SEED)), "wall_s": 100.0}
    priority = {**direct, "label": "priority", "wall_s": 90.0}
    gateway = {**direct, "label": "inferry", "wall_s": 99.5}
    (verdict,) = harbor_h200.verdicts([direct, priority, gateway])
    assert [target for target, met in verdict["met"].items() if not met] == [
        "all done within 1.10 of the faster direct arm"
    ]


def test_stored_results_equal_what_the_load_generator_printed() -> None:
    printed = json.loads((RESULTS / "harbor-h200.json").read_text())["result"]
    names = sorted(harbor_h200.file_name(row["label"], row["seed"], row["attempt"]) for row in printed)
    assert names == sorted(path.name for path in harbor_h200.RECORDINGS.glob("*.json.xz"))
    row = next(row for row in printed if row["label"] == "inferry")
    assert differences(figures(read(harbor_h200.RECORDINGS / f"inferry_{row['seed']}.json.xz")), row) == []


def test_results_of_earlier_comparisons_are_stored() -> None:
    attained = json.loads((RESULTS / "harbor-h200.json").read_text())["before"]
    assert [comparison["commit"] for comparison in attained] == [directory.name for directory in harbor_h200.BEFORE]
    for comparison, directory in zip(attained, harbor_h200.BEFORE, strict=True):
        printed = {(row["label"], row["seed"], row["attempt"]): row for row in comparison["result"]}
        row = printed["inferry", 23, 1]
        assert differences(figures(read(directory / "inferry_23.json.xz")), row) == []
        names = {harbor_h200.file_name(*of) for of in printed if of[0] == "inferry"}
        assert names == {path.name for path in directory.glob("*.json.xz")}


def test_a_row_without_direct_ones_beside_it_has_no_verdict() -> None:
    gateway = {**figures(to_recording(played(), "direct", SEED)), "label": "inferry"}
    assert harbor_h200.verdicts([gateway]) == []


def test_the_simulator_tracks_prompt_prefixes_as_the_gateway_does() -> None:
    """What the memory of prompts expects is about what the engine then computes. The scheduler may deduct what
    it takes to be warm from that, and never adds to it.
    """
    frontend = PromptMemoryFrontend()
    told = simulate_seed(SEED, frontend)
    assert told["kept"].keys() == {"P0", "P1", "P2"}
    assert all(0.8 <= part <= 1.02 for part in told["computed_of_expected"].values())
    assert all(0 < frontend.charged[lane] <= frontend.expected[lane] for lane in Lane)


def test_plots_are_drawn(tmp_path: Path) -> None:
    from benchmarks.harbor_plots import draw

    some = to_recording([row for row in played() if row["run"] in ("run-1", "run-2", "digest-1")], "inferry", SEED)
    drawn = draw(tmp_path, [replace(some, arm="direct"), some, replace(some, attempt=2)])
    assert all(path.stat().st_size > 1000 for path in drawn)
