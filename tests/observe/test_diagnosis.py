"""Rules of the diagnosis at their edges. Whole situations are in `simulation/test_staged_situations.py`."""

from typing import Any

import pytest

from inferry.domain.traffic import LaneTraffic
from inferry.observe.diagnosis.advice import give_advice
from inferry.observe.diagnosis.diagnose import diagnose
from inferry.observe.diagnosis.facts import Facts, LimitedTenant
from inferry.observe.diagnosis.findings import Advice, Evidence
from inferry.observe.diagnosis.latency import lane_splits
from observe.diagnosis_facts import a_lane, a_worker, some_facts

LATE: dict[str, Any] = {"wait_p95_ms": 9000.0, "attainment": 0.2, "depth": 80.0}


def cause(facts: Facts) -> str | None:
    return diagnose(facts, 0.0).cause


def a_traffic(**changed: Any) -> LaneTraffic:
    return LaneTraffic(
        **{
            "lane": "P1",
            "attempts": 200,
            "done": 200,
            "cancelled": 0,
            "expired": 0,
            "failed": 0,
            "queue_ms": 5.0,
            "batching_ms": None,
            "prefill_ms": 40.0,
            "decode_ms": 400.0,
            "tool_ms": None,
            "tool_calls": 0,
            "worker_s": 80.0,
            "prompt_tokens": 500.0,
            "prompt_tokens_sd": 100.0,
            "output_tokens": 50.0,
            "cached_ratio": 0.0,
            "templated_ratio": 0.0,
            **changed,
        }
    )


def test_healthy_traffic_has_no_cause() -> None:
    found = diagnose(some_facts(), 5.0)
    assert (found.verdict, found.cause, found.findings, found.at) == ("healthy", None, (), 5.0)
    assert "200 calls" in found.summary


def test_without_enough_calls_or_time_nothing_is_said_about_traffic() -> None:
    few = some_facts(lanes=(a_lane(calls=19, **LATE),))
    assert diagnose(few, 0.0).verdict == "not_enough_data"
    assert diagnose(some_facts(observed_s=10.0), 0.0).verdict == "not_enough_data"
    # A dead worker needs no traffic.
    assert cause(some_facts(lanes=(a_lane(calls=0),), workers=(a_worker(phase="down"),))) == "dead_worker"


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ({"phase": "down"}, "dead_worker"),
        ({"phase": "starting"}, "dead_worker"),
        ({"breaker": "half_open"}, "dead_worker"),
        ({"opens": 2}, "dead_worker"),
        ({"phase": "draining", "drained": True}, "drained_workers"),
    ],
)
def test_a_worker_that_does_not_serve_comes_first(worker: dict[str, Any], expected: str) -> None:
    assert cause(some_facts(lanes=(a_lane(**LATE),), workers=(a_worker(**worker),))) == expected


def test_a_worker_that_was_lost_with_its_calls_and_is_back_at_once_is_not_starved() -> None:
    killed = a_worker(sequences=8, running=8.0, up_ratio=0.95)
    late = (a_lane(**LATE),)
    assert cause(some_facts(lanes=late, workers=(killed,), retries=3)) == "dead_worker"
    assert cause(some_facts(lanes=late, workers=(killed,), errors={"worker_lost": 1})) == "dead_worker"
    assert cause(some_facts(lanes=late, workers=(killed,))) == "starved_gpu", "it was not up when the gateway started"


def test_the_gateway_and_its_ledger_are_looked_at() -> None:
    assert cause(some_facts(ledger_up=False)) == "ledger_down"
    assert cause(some_facts(ledger_up=True, ledger_dropped=3)) == "ledger_down"
    assert cause(some_facts(loop_lag_p99_ms=80.0)) == "gateway_busy"
    assert cause(some_facts(loop_lag_p99_ms=20.0, ledger_up=True)) is None


def test_refusals_of_limits_name_the_tenant_that_is_nearest_to_its_limit() -> None:
    limited = (
        LimitedTenant(tenant="a", limit="requests_per_minute", value=60, used_ratio=0.7),
        LimitedTenant(tenant="b", limit="requests_per_minute", value=120, used_ratio=1.0),
        LimitedTenant(tenant="c", limit="max_concurrent", value=1, used_ratio=1.0),
    )
    found = diagnose(some_facts(errors={"rate_limited": 200}, limited=limited), 0.0)
    assert (found.cause, found.findings[0].where) == ("quota_too_tight", "tenant b")
    assert found.findings[0].setting.text == "tenants.b.requests_per_minute: 300 (now 120)"
    unknown = diagnose(some_facts(errors={"tenant_concurrency": 50}), 0.0)
    assert unknown.findings[0].setting.key == "tenants.NAME.max_concurrent"
    assert cause(some_facts(errors={"rate_limited": 4})) is None


def test_a_full_worker_with_slow_steps_is_overloaded_and_not_starved() -> None:
    full = a_worker(sequences=8, running=8.0)
    assert cause(some_facts(lanes=(a_lane(**LATE),), workers=(full,))) == "starved_gpu"
    slow = a_lane(**LATE, itl_p50_ms=40.0, itl_p95_ms=60.0)
    assert cause(some_facts(lanes=(slow,), workers=(full,))) == "overload"
    idle = a_worker(sequences=8, running=8.0, utilisation=0.2)
    assert cause(some_facts(lanes=(slow,), workers=(idle,))) == "overload", "more sequences would miss the ITL target"
    busy = a_lane(**LATE, itl_p50_ms=40.0, itl_p95_ms=48.0)
    assert cause(some_facts(lanes=(busy,), workers=(idle,))) == "starved_gpu"


def test_the_limit_that_bound_decides_between_sequences_and_kv() -> None:
    lanes = (a_lane(**LATE),)
    by_kv = a_worker(kv_ratio=0.7, limits={"kv_tokens": 90, "sequences": 5, "lane_reserve": 500})
    assert cause(some_facts(lanes=lanes, workers=(by_kv,))) == "kv_pressure"
    by_sequences = a_worker(kv_ratio=0.9, sequences=8, running=8.0, limits={"sequences": 90})
    assert cause(some_facts(lanes=lanes, workers=(by_sequences,))) != "kv_pressure"
    timed = a_worker(kv_ratio=0.9, kv_packing="timed")
    (first, *_) = diagnose(some_facts(lanes=lanes, workers=(timed,)), 0.0).findings
    assert first.setting.text == "--kv-cache-dtype fp8"


def test_a_lane_that_leaves_too_much_to_higher_lanes_is_told_to_leave_less() -> None:
    lanes = (a_lane(**LATE, reserve=0.9),)
    found = diagnose(some_facts(lanes=lanes, workers=(a_worker(sequences=40, running=4.0),)), 0.0)
    assert (found.cause, found.findings[0].setting.text) == ("starved_gpu", "lanes.P1.reserve: 0.05 (now 0.9)")


BATCH: dict[str, Any] = {"ttft_ms": None, "itl_ms": None, "attainment": None, "measured": 0, "reserve": 0.25}


def test_a_burst_of_batch_work_in_an_idle_window_is_judged_by_its_own_time() -> None:
    """Two minutes of five: 48 of 64 sequences ran then, which is what the lane does not leave to higher ones."""
    batch = a_lane("P2", **BATCH, wait_p95_ms=60_000.0, depth=50.0)
    worker = a_worker(sequences=64, running=4.6, utilisation=0.1, running_queued=48.0, utilisation_queued=0.95)
    slow = a_lane("P0", itl_ms=30.0, itl_p50_ms=28.0, itl_p95_ms=63.0)
    found = diagnose(some_facts(lanes=(slow, batch), workers=(worker,)), 0.0)
    assert (found.verdict, found.findings) == ("healthy", ())
    assert "Calls of lane P2 wait: it leaves 25% of worker engine to higher lanes." in found.summary
    fast = some_facts(lanes=(a_lane("P0", itl_ms=30.0), batch), workers=(worker,))
    (finding,) = diagnose(fast, 0.0).findings
    assert (finding.cause, finding.setting.text) == ("starved_gpu", "lanes.P2.reserve: 0.1 (now 0.25)")
    assert "running sequences of worker engine while calls were queued: 48 sequences" in finding.evidence[2].text


def test_more_sequences_are_not_proposed_where_few_run() -> None:
    """The capacity controller holds batch work at fewer sequences than configured: a higher limit changes nothing."""
    batch = a_lane("P2", **{**BATCH, "reserve": 0.0}, wait_p95_ms=60_000.0, depth=50.0)
    worker = a_worker(sequences=64, running=4.6, utilisation=0.1, limits={"batch_sequences": 90})
    assert cause(some_facts(lanes=(a_lane(), batch), workers=(worker,))) is None


def test_idle_workers_outside_of_a_lanes_groups_are_named() -> None:
    workers = (a_worker("a", group="small", sequences=8, running=8.0), a_worker("b", group="large", running=0.0))
    found = diagnose(some_facts(lanes=(a_lane(**LATE, groups=("small",)),), workers=workers), 0.0)
    assert (found.cause, found.findings[0].setting.text) == (
        *("idle_group", "lanes.P1.groups: [small, large] (now [small])"),
    )
    busy = (workers[0], a_worker("b", group="large", running=200.0))
    assert cause(some_facts(lanes=(a_lane(**LATE, groups=("small",)),), workers=busy)) == "starved_gpu"


def test_batch_work_that_waits_is_no_flood_while_targets_are_met() -> None:
    batch = a_lane("P2", ttft_ms=None, itl_ms=None, attainment=None, measured=0, depth=500.0, running_now=50)
    busy = a_worker(running=200.0, sequences=256)
    assert cause(some_facts(lanes=(a_lane(), batch), workers=(busy,))) is None
    late = a_lane(**LATE)
    found = diagnose(some_facts(lanes=(late, batch), workers=(busy,)), 0.0)
    assert found.cause == "p2_flood"
    assert found.findings[0].setting.text == "lanes.P2.reserve: 0.25 (now 0)"


def test_a_flood_names_the_tenant_that_holds_most_of_its_lane() -> None:
    batch = {"ttft_ms": None, "itl_ms": None, "attainment": None, "measured": 0, "depth": 500.0, "running_now": 50}

    def where(share: float) -> str:
        traffic = a_traffic(lane="P2", worker_s=900.0, top_tenant="import", top_tenant_share=share)
        lanes = (a_lane(**LATE), a_lane("P2", **batch, traffic=traffic))
        (found, *_) = diagnose(some_facts(lanes=lanes, workers=(a_worker(running=200.0),)), 0.0).findings
        assert found.cause == "p2_flood"
        return found.where

    assert (where(0.8), where(0.4)) == ("tenant import", "lane P2")


def test_bursts_have_an_empty_queue_between_them() -> None:
    full = a_worker(sequences=8, running=3.0)
    late = {**LATE, "itl_p50_ms": 40.0, "itl_p95_ms": 60.0}
    for backlogs, queued_ratio, expected in ((2, 0.4, "bursts"), (1, 0.4, "overload"), (2, 0.6, "overload")):
        lane = a_lane(**late, backlogs=backlogs, queued_ratio=queued_ratio)
        assert cause(some_facts(lanes=(lane,), workers=(full,))) == expected


def test_causes_inside_the_engine_are_ordered_by_the_lateness_that_they_explain() -> None:
    def causes(prefill_ms: float, templated_ratio: float = 0.0) -> list[tuple[str, float | None]]:
        traffic = a_traffic(prefill_ms=prefill_ms, output_tokens=100.0, templated_ratio=templated_ratio)
        late = a_lane(attainment=0.2, itl_p50_ms=60.0, traffic=traffic)
        return [(one.cause, one.late_ms) for one in diagnose(some_facts(lanes=(late,)), 0.0).findings]

    # A target of 2 s and 50 ms per token: 10 ms more for each of 100 tokens are one second.
    assert causes(2500.0) == [("decode_bound", 1000.0), ("prefill_bound", 500.0)]
    assert causes(4000.0) == [("prefill_bound", 2000.0), ("decode_bound", 1000.0)]
    assert causes(4000.0, 1.0)[0] == ("cold_cache", 2000.0)


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_calls_that_miss_their_deadline_name_the_stage_that_takes_longest(stage: str) -> None:
    lanes = (a_lane(traffic=a_traffic(expired=100, **{f"{stage}_ms": 1500.0})),)
    (found,) = diagnose(some_facts(lanes=lanes, errors={"deadline_exceeded": 100}), 0.0).findings
    assert (found.cause, found.stage) == ("deadlines_missed", stage)


def test_a_full_queue_is_that_of_the_lane_with_the_smallest_limit_for_its_traffic() -> None:
    lanes = (a_lane("P0", calls=0, calls_per_s=0.0), a_lane(queue_limit=4))
    (found,) = diagnose(some_facts(lanes=lanes, errors={"queue_full": 100}), 0.0).findings
    assert (found.cause, found.where) == ("queue_full", "lane P1")


def test_a_worker_that_is_up_again_is_not_to_be_restarted() -> None:
    (back,) = diagnose(some_facts(workers=(a_worker(opens=1),)), 0.0).findings
    (broken,) = diagnose(some_facts(workers=(a_worker(opens=1, breaker="open"),)), 0.0).findings
    assert "1 of 1 workers serve" in back.summary
    assert "0 of 1 workers serve" in broken.summary
    assert not back.setting.text.startswith("restart")
    assert broken.setting.text.startswith("restart")


def test_padding_is_measured_where_it_can_be_and_estimated_elsewhere() -> None:
    measured = a_worker(pads=True, batch=8.0, padding_ratio=0.6)
    found = diagnose(some_facts(workers=(measured,)), 0.0)
    assert found.cause == "padding"
    assert "estimated" not in found.findings[0].evidence[0].text
    spread = (a_lane(traffic=a_traffic(prompt_tokens_sd=600.0)),)
    found = diagnose(some_facts(lanes=spread, workers=(a_worker(pads=True, batch=8.0),)), 0.0)
    assert found.cause == "padding"
    assert "estimated" in found.findings[0].evidence[0].text
    assert cause(some_facts(lanes=spread, workers=(a_worker(pads=True, batch=8.0, padding_ratio=0.1),))) is None


def test_the_split_of_latency_uses_what_is_known() -> None:
    (known,) = lane_splits(some_facts(lanes=(a_lane(traffic=a_traffic(tool_ms=1000.0, tool_calls=100)),)))
    assert [(part.stage, part.mean_ms) for part in known.parts] == [
        *(("queue", 5.0), ("prefill", 40.0), ("decode", 400.0), ("tool", 500.0)),
    ]
    assert sum(part.share for part in known.parts) == pytest.approx(1.0)
    (without_ledger,) = lane_splits(some_facts())
    assert [part.stage for part in without_ledger.parts] == ["queue", "prefill"]


@pytest.mark.parametrize(
    ("traffic", "technique"),
    [
        ({"tool_ms": 2000.0, "tool_calls": 200}, "parallel tools"),
        ({"prefill_ms": 4000.0, "templated_ratio": 0.9}, "caching"),
        ({"prefill_ms": 10.0, "decode_ms": 4000.0}, "none needed"),
        ({"queue_ms": 4000.0}, "batching"),
        ({"prefill_ms": 4000.0}, "none needed"),
    ],
)
def test_the_technique_follows_from_where_the_time_goes(traffic: dict[str, Any], technique: str) -> None:
    advice = give_advice(some_facts(lanes=(a_lane(traffic=a_traffic(**traffic)),), prompt_tokens=1000))
    assert {one.about: one.choice for one in advice}["technique"] == technique


def test_a_smaller_model_is_advised_for_long_decoding_where_calls_are_late_and_is_cheaper_elsewhere() -> None:
    decoding = a_traffic(prefill_ms=10.0, decode_ms=4000.0)

    def technique(**lane: Any) -> Advice:
        advice = give_advice(some_facts(lanes=(a_lane(traffic=decoding, **lane),)))
        return next(one for one in advice if one.about == "technique")

    assert technique(attainment=0.2).choice == "a smaller model"
    in_time = technique()
    assert in_time.choice == "none needed"
    assert "no lane is late; 100% of the time is decoding" in in_time.why
    assert in_time.why.endswith("which a smaller model would make cheaper.")


def test_late_calls_that_do_not_wait_need_a_smaller_model_or_places_in_the_engine() -> None:
    late = a_lane(attainment=0.2, traffic=a_traffic(prefill_ms=4000.0))

    def technique(waiting: float) -> str:
        advice = give_advice(some_facts(lanes=(late,), workers=(a_worker(waiting=waiting),)))
        return {one.about: one.choice for one in advice}["technique"]

    assert (technique(0.0), technique(5.0)) == ("a smaller model", "batching")


@pytest.mark.parametrize(
    ("lane", "worker", "mode"),
    [
        ({"itl_p99_ms": 51.0}, {}, "hybrid"),
        ({"itl_p99_ms": 50.0}, {}, "continuous"),
        ({"itl_p99_ms": 90.0, "itl_p50_ms": 60.0}, {}, "continuous"),
        ({"itl_p99_ms": 51.0}, {"pads": True}, "continuous"),
        ({"itl_p99_ms": None}, {}, "continuous"),
    ],
    ids=["late p99", "p99 in time", "every step is late", "prompts share no steps", "no streams"],
)
def test_streams_that_stutter_beside_prompts_need_the_hybrid_mode(
    lane: dict[str, Any], worker: dict[str, Any], mode: str
) -> None:
    advice = give_advice(some_facts(lanes=(a_lane(**lane),), workers=(a_worker(**worker),)))
    assert {one.about: one.choice for one in advice}["batching mode"] == mode


def test_batching_mode_and_scale_follow_the_traffic() -> None:
    def choices(facts: Facts) -> tuple[str, str]:
        found = {one.about: one.choice for one in give_advice(facts)}
        return found["batching mode"], found["scale"]

    batch = {"ttft_ms": None, "itl_ms": None, "attainment": None}
    alike = some_facts(lanes=(a_lane("P2", **batch, traffic=a_traffic(prompt_tokens_sd=50.0)),))
    mixed = some_facts(lanes=(a_lane("P2", **batch, traffic=a_traffic(prompt_tokens_sd=900.0)),))
    assert choices(some_facts()) == ("continuous", "one process")
    assert choices(alike)[0].startswith("static")
    assert choices(mixed)[0].startswith("dynamic")
    two = some_facts(workers=(a_worker("a"), a_worker("b")))
    assert choices(two)[1] == "several engines behind one gateway process"
    eight = tuple(a_worker(str(number)) for number in range(8))
    assert choices(some_facts(workers=eight))[1] == "several engines behind one gateway process"
    assert choices(some_facts(workers=(*eight, a_worker("ninth"))))[1] == "several nodes"
    late = (a_lane(**LATE, itl_p50_ms=45.0),)
    busy = tuple(a_worker(str(number), sequences=8, running=8.0) for number in range(8))
    assert choices(some_facts(lanes=late, workers=busy))[1] == "several nodes"
    assert choices(some_facts(lanes=(a_lane(calls=60 * 2001),)))[1] == "several nodes"
    starved = some_facts(lanes=(a_lane(**LATE),), workers=(a_worker(sequences=8, running=8.0),))
    assert choices(starved)[1] == "one process"
    slow = a_lane(**LATE, itl_p50_ms=45.0)
    full = some_facts(lanes=(slow,), workers=(a_worker(sequences=8, running=8.0),))
    assert choices(full)[1] == "several engines behind one gateway process"


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (Evidence("wait", 2500.0, "ms", 500.0), "wait: 2.50 s (compare 500 ms)"),
        (Evidence("wait", 7.25, "ms"), "wait: 7.2 ms"),
        (Evidence("part", 0.256, "ratio", 1.0), "part: 26% (compare 100%)"),
        (Evidence("depth", 3.5, "jobs"), "depth: 3.5 jobs"),
        (Evidence("calls", 1200, "calls"), "calls: 1200 calls"),
    ],
)
def test_evidence_has_units(evidence: Evidence, text: str) -> None:
    assert evidence.text == text


@pytest.mark.parametrize(("chunk", "better"), [(16_384, 2048), (4096, 1024)])
def test_a_smaller_step_is_advised_by_its_measured_length(chunk: int, better: int) -> None:
    late = a_lane(**LATE, itl_ms=30.0, itl_p50_ms=10.0, itl_p99_ms=400.0)
    finding = diagnose(some_facts(lanes=(late,), workers=(a_worker(chunk_tokens=chunk),)), 0.0).findings[0]
    assert finding.setting is not None
    assert (finding.cause, finding.setting.value) == ("engine_flags", str(better))
