"""The diagnosis names the cause of situations that are staged with a real gateway in virtual time."""

from pathlib import Path

import msgspec
import pytest

from support.staging.engines import ContinuousWorker
from support.staging.situations import MORE_SITUATIONS, SITUATIONS, Situation
from support.staging.stage import Stage, with_stage

CANARY = "template-<b>canary</b>"
SEVERAL_ENGINES = "several engines behind one gateway process"
ADVICE = {
    "starved GPU": ("continuous", "batching", "one process"),
    "P2 flood": ("hybrid", "batching", SEVERAL_ENGINES),
    "window too short": ("continuous", "none needed", "one process"),
    "padding": ("continuous", "batching", SEVERAL_ENGINES),
    "slow tool": ("continuous", "parallel tools", "one process"),
    "KV pressure": ("hybrid", "batching", SEVERAL_ENGINES),
    "slow reader": ("continuous", "none needed", "one process"),
    "dead worker": ("continuous", "none needed", "one process"),
    "small batches": ("continuous", "batching", SEVERAL_ENGINES),
    "engine flags": ("hybrid", "a smaller model", SEVERAL_ENGINES),
    "quota too tight": ("continuous", "none needed", "one process"),
    "healthy": ("continuous", "none needed", SEVERAL_ENGINES),
    "overload": ("hybrid", "batching", SEVERAL_ENGINES),
    "window too long": ("continuous", "batching", "one process"),
    "cold cache": ("continuous", "caching", "one process"),
    "warm cache": ("continuous", "none needed", "one process"),
    "long prompts": ("continuous", "a smaller model", "one process"),
    "slow engine": ("continuous", "a smaller model", SEVERAL_ENGINES),
    "one slow worker": ("continuous", "a smaller model", SEVERAL_ENGINES),
    "queue limit": ("continuous", "none needed", "one process"),
    "impatient clients": ("continuous", "none needed", "one process"),
    "starved by batch work": ("dynamic or continuous", "batching", "one process"),
    "limit of the engine": ("continuous", "batching", SEVERAL_ENGINES),
    "KV cache of the engine": ("hybrid", "batching", SEVERAL_ENGINES),
    "concurrency quota": ("continuous", "none needed", "one process"),
    "batch work waits": ("dynamic or continuous", "batching", SEVERAL_ENGINES),
}
"""Batching mode, technique and scale that fit the traffic of each situation."""


@pytest.mark.parametrize("situation", [*SITUATIONS, *MORE_SITUATIONS], ids=lambda one: one.name)
def test_the_cause_of_a_staged_situation_is_named(tmp_path: Path, situation: Situation) -> None:
    found = with_stage(tmp_path, situation.workers, situation.play, **situation.config)
    assert found.cause == situation.cause, [finding.cause for finding in found.findings]
    if situation.cause is None:
        assert (found.verdict, found.findings) == ("healthy", ())
    else:
        first = found.findings[0]
        assert found.verdict == "problem"
        assert first.evidence
        assert first.setting.text
        assert all(one.unit or one.what for one in first.evidence)
    assert [one.about for one in found.advice] == ["batching mode", "technique", "scale"]
    assert tuple(one.choice.split(",")[0] for one in found.advice) == ADVICE[situation.name]


def test_few_calls_are_not_enough(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.arrivals(0.1, 60)

    found = with_stage(tmp_path, lambda: [ContinuousWorker()], play)
    assert (found.verdict, found.cause, found.advice) == ("not_enough_data", None, ())
    assert "Not enough data" in found.summary


def test_the_same_situation_gives_the_same_diagnosis(tmp_path: Path) -> None:
    one = SITUATIONS[2]
    first, second = (
        with_stage(_made(tmp_path / name), one.workers, one.play, **one.config) for name in ("first", "second")
    )
    assert msgspec.json.encode(first) == msgspec.json.encode(second)


def test_the_quota_that_binds_is_named_with_its_tenant_and_a_higher_value(tmp_path: Path) -> None:
    (one,) = (one for one in SITUATIONS if one.cause == "quota_too_tight")
    setting = with_stage(tmp_path, one.workers, one.play, **one.config).findings[0].setting
    assert (setting.kind, setting.key, setting.now) == ("config", "tenants.acme.requests_per_minute", "60")
    assert float(setting.value) > 200


def test_a_flood_of_batch_work_names_its_tenant(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.start(stage.arrivals(1, 90, tenant="shop", lane="P2", prompt=(1000, 3000), output=(400, 600)))
        stage.start(stage.arrivals(7, 90, tenant="import", lane="P2", prompt=(1000, 3000), output=(400, 600)))
        await stage.arrivals(2, 90, tenant="shop", lane="P0", prompt=(200, 400), output=(20, 40))

    (flood,) = (one for one in SITUATIONS if one.cause == "p2_flood")
    found = with_stage(tmp_path, flood.workers, play, **flood.config).findings[0]
    assert (found.cause, found.where) == ("p2_flood", "tenant import")


def test_the_latency_of_runs_is_split_into_its_stages(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.agents(4, 60, tool_s=2.0, prompt=1000, output=100, template=CANARY)

    found = with_stage(tmp_path, lambda: [ContinuousWorker()], play)
    (lane,) = found.split
    parts = {part.stage: part.mean_ms for part in lane.parts}
    # 6 ms per step and some for the sequences beside it; 25 microseconds per prompt token.
    assert 25 <= parts["prefill"] <= 70
    assert 594 <= parts["decode"] <= 800
    assert 1700 <= parts["tool"] <= 2000
    assert sum(part.share for part in lane.parts) == pytest.approx(1.0)
    assert CANARY not in msgspec.json.encode(found).decode()


def _made(path: Path) -> Path:
    path.mkdir()
    return path
