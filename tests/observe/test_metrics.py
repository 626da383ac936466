"""Metrics: everything in the table is exported, nothing else, with bounded labels and right numbers."""

import random
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, GatewayError, QueueFull, QueueTimeout, WorkerLost
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, End, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, KvBlocks, Load, Phase, WorkerView
from inferry.observe.counters import FastCounter, FastHistogram
from inferry.observe.metric_table import METRIC_TABLE
from inferry.observe.metrics import Metrics

Labels = frozenset[tuple[str, str]]

NO_USAGE = Usage()
IDLE = Load()


def a_job(lane: Lane = Lane.P0, model: str = "tiny", arrived_at: float = 100.0) -> InferenceJob:
    route = RouteKey(model)
    exact = Estimate.exactly(8)
    return InferenceJob(
        job_id="job-1",
        tenant="acme",
        run_id="run-1",
        step_id="step-1",
        lane=lane,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(exact, Estimate.exactly(0), exact),
        token_budget=16,
        prompt_hash="",
        arrived_at=arrived_at,
        max_wait_s=1.0,
        payload=Payload(api="chat", body=b"{}", sampling=Sampling()),
    )


def a_plan(*jobs: InferenceJob, worker: str = "gpu-a", reason: ReleaseReason = ReleaseReason.IMMEDIATE) -> BatchPlan:
    return BatchPlan(plan_id=1, worker=worker, jobs=jobs, reason=reason, formed_at=100.0)


def an_attempt(job: InferenceJob, end: End, *, attained: bool | None = None, output_tokens: int = 0) -> Attempt:
    """One that was sent, had its first token a quarter of a second later, and has ended."""
    attempt = Attempt(job)
    attempt.sent(a_plan(job), 100.5)
    attempt.first_token(100.75)
    attempt.slo_attained = attained
    attempt.output_tokens = output_tokens
    attempt.ended(end, 101.0)
    attempt.ledger_entry = attempt.entry(123.0)
    return attempt


def send(metrics: Metrics, plan: BatchPlan, now: float) -> None:
    for job in plan.jobs:
        attempt = Attempt(job)
        attempt.sent(plan, now)
        metrics.sent(attempt, now)


def produce(metrics: Metrics, lane: Lane, itl_s: float) -> None:
    attempt = Attempt(a_job(lane))
    attempt.last_token_at = 0.0
    metrics.produced(attempt, itl_s)


def done(usage: Usage = NO_USAGE) -> Done:
    return Done("job-1", FinishReason.STOP, usage)


def a_view(worker: str, phase: Phase = Phase.READY, load: Load = IDLE, kv_capacity: int | None = None) -> WorkerView:
    return WorkerView(
        worker=worker,
        models=frozenset({"tiny"}),
        phase=phase,
        capacity=Capacity(),
        observed_at=0.0,
        load=load,
        kv_capacity=kv_capacity,
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(models=["tiny", "large"], workers=["gpu-a", "gpu-b"])


def samples(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    body, _ = metrics.render()
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is exported twice"
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((f"inferry_{name}", frozenset(labels.items())))


# --- the table


def test_every_row_of_the_table_can_be_made_by_prometheus_client() -> None:
    registry = CollectorRegistry()
    for spec in METRIC_TABLE:
        assert spec.name.startswith("inferry_")
        assert spec.help.endswith(".")
        match spec.kind:
            case "counter":
                assert spec.name.endswith("_total")
                Counter(spec.name, spec.help, spec.labels, registry=registry)
            case "gauge":
                Gauge(spec.name, spec.help, spec.labels, registry=registry)
            case "histogram":
                Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=registry)
        assert bool(spec.buckets) == (spec.kind == "histogram")


def test_the_exposition_holds_exactly_the_table_and_the_process(metrics: Metrics) -> None:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    ours = {name: family for name, family in families.items() if not name.startswith("process_")}
    assert list(ours) == [spec.name.removesuffix("_total") for spec in METRIC_TABLE]
    assert "process_resident_memory_bytes" in families
    for spec in METRIC_TABLE:
        family = ours[spec.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (spec.kind, spec.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels)


def test_the_exposition_reads_the_same_as_prometheus_client_would_write_it(metrics: Metrics) -> None:
    registry = CollectorRegistry()
    spec = next(spec for spec in METRIC_TABLE if spec.name == "inferry_inter_token_latency_seconds")
    reference = Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=registry)
    dice = random.Random(1)
    for lane in Lane:
        for _ in range(500):
            itl_s = dice.choice([*spec.buckets, dice.expovariate(20)])
            produce(metrics, lane, itl_s)
            reference.labels(lane.name, "tiny").observe(itl_s)
    found = samples(metrics)
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                key = (sample.name, frozenset(sample.labels.items()))
                assert found[key] == pytest.approx(sample.value, rel=1e-12)


# --- what is counted


def test_a_plan_tells_waits_size_and_reason(metrics: Metrics) -> None:
    arrivals = [(Lane.P0, 99.5), (Lane.P0, 99.0), (Lane.P2, 90.0)]
    jobs = [replace(a_job(lane, arrived_at=at), job_id=f"job-{at}") for lane, at in arrivals]
    send(metrics, a_plan(*jobs, reason=ReleaseReason.WINDOW), 100.0)
    assert value(metrics, "queue_wait_seconds_sum", lane="P0", model="tiny") == 1.5
    assert value(metrics, "queue_wait_seconds_count", lane="P0", model="tiny") == 2
    assert value(metrics, "queue_wait_seconds_bucket", lane="P0", model="tiny", le="0.5") == 1
    assert value(metrics, "queue_wait_seconds_bucket", lane="P2", model="tiny", le="10.0") == 1
    assert value(metrics, "batch_size_sum", worker="gpu-a") == 3
    assert value(metrics, "plans_total", reason="window") == 1
    assert value(metrics, "plans_total", reason="size") == 0


def test_the_first_token_is_counted_from_arrival(metrics: Metrics) -> None:
    metrics.first_token(an_attempt(a_job(Lane.P1, "large"), done()), 100.75)
    assert value(metrics, "time_to_first_token_seconds_sum", lane="P1", model="large") == 0.75
    assert value(metrics, "time_to_first_token_seconds_count", lane="P1", model="tiny") == 0


def test_an_end_counts_outcome_and_tokens(metrics: Metrics) -> None:
    metrics.ended(an_attempt(a_job(), done(Usage(100, 60, 7))), 101.0)
    assert value(metrics, "jobs_total", lane="P0", model="tiny", outcome="done") == 1
    for kind, count in (("prompt", 100), ("cached", 60), ("output", 7)):
        assert value(metrics, "tokens_total", kind=kind, model="tiny", lane="P0") == count


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (WorkerLost("gone"), "failed", "worker_lost"),
        (ClientClosed("left"), "cancelled", "client_closed"),
        (QueueTimeout("late"), "expired", "queue_timeout"),
    ],
)
def test_a_failure_counts_its_code_and_no_slo_attempt(
    metrics: Metrics, error: GatewayError, outcome: str, code: str
) -> None:
    metrics.ended(an_attempt(a_job(), Failed("job-1", error), attained=True), 101.0)
    assert value(metrics, "jobs_total", lane="P0", model="tiny", outcome=outcome) == 1
    assert value(metrics, "errors_total", code=code) == 1
    assert value(metrics, "slo_attainment_total", lane="P0", model="tiny", attained="true") == 0
    assert value(metrics, "slo_attainment_total", lane="P0", model="tiny", attained="false") == 0


def test_the_metrics_count_what_the_ledger_keeps(metrics: Metrics) -> None:
    lost = Failed("job-1", WorkerLost("gone"), Usage(50, 0, 0))
    metrics.ended(an_attempt(a_job(), lost, output_tokens=9), 101.0)
    assert value(metrics, "tokens_total", kind="output", model="tiny", lane="P0") == 9
    assert value(metrics, "errors_total", code="worker_lost") == 1


def test_slo_attempts_count_only_in_lanes_with_targets(metrics: Metrics) -> None:
    metrics.ended(an_attempt(a_job(), done(), attained=True), 101.0)
    metrics.ended(an_attempt(a_job(), done(), attained=False), 101.0)
    metrics.ended(an_attempt(a_job(), done(), attained=False), 101.0)
    metrics.ended(an_attempt(a_job(Lane.P2), done()), 101.0)
    assert value(metrics, "slo_attainment_total", lane="P0", model="tiny", attained="true") == 1
    assert value(metrics, "slo_attainment_total", lane="P0", model="tiny", attained="false") == 2
    assert value(metrics, "slo_attainment_total", lane="P2", model="tiny", attained="true") == 0


def test_jobs_in_flight_are_those_offered_and_not_ended(metrics: Metrics) -> None:
    for _ in range(3):
        metrics.queued(Attempt(a_job()), 100.0)
    metrics.ended(an_attempt(a_job(), done()), 101.0)
    assert value(metrics, "jobs_in_flight") == 2


def test_a_refusal_counts_its_code(metrics: Metrics) -> None:
    metrics.refused(QueueFull.code)
    assert value(metrics, "errors_total", code="queue_full") == 1


# --- what is read at scrape time


def test_gauges_are_read_on_scrape(metrics: Metrics) -> None:
    depths: dict[tuple[Lane, str], float] = {(Lane.P0, "tiny"): 1}
    views = [
        a_view("gpu-a", load=Load(running=3, waiting=2, kv_tokens=1000), kv_capacity=4096),
        a_view("gpu-b", Phase.DRAINING),
    ]
    written = [10]
    assert value(metrics, "queue_depth", lane="P0", model="tiny") is None
    metrics.workers.views = lambda: views
    metrics.watch({"inferry_queue_depth": lambda: metrics.by_lane_and_model(depths)})
    metrics.watch({"inferry_open_streams": lambda: 5})
    metrics.watch({"inferry_merged_deltas_total": lambda: 7, "inferry_ledger_entries_dropped_total": lambda: 0})
    metrics.watch({"inferry_ledger_entries_written_total": lambda: written[0]})
    metrics.watch({"inferry_wait_prediction_coverage_ratio": lambda: {Lane.P1: 0.875}})
    metrics.watch({"inferry_output_prediction_log_error": lambda: 0.5})
    depths[Lane.P0, "tiny"], depths[Lane.P1, "unknown"], written[0] = 4, 2, 11
    found = {
        (name.removeprefix("inferry_"), *sorted(v for _, v in labels)): number
        for (name, labels), number in samples(metrics).items()
    }
    assert [found["queue_depth", lane.name, "tiny"] for lane in Lane] == [4, 0, 0]
    assert found["queue_depth", "P1", "other"] == 2
    assert found["worker_up", "gpu-a"] == found["worker_up", "gpu-b"] == 1
    assert found["worker_running_sequences", "gpu-a"] == 3
    assert found["worker_waiting_sequences", "gpu-a"] == 2
    assert found["worker_kv_used_tokens", "gpu-a"] == 1000
    assert found["worker_kv_capacity_tokens", "gpu-a"] == 4096
    assert ("worker_kv_capacity_tokens", "gpu-b") not in found, "what is not known is not zero"
    assert found[("open_streams",)] == 5
    assert found[("merged_deltas_total",)] == 7
    assert found[("ledger_entries_written_total",)] == 11
    assert found[("ledger_entries_dropped_total",)] == 0
    assert found["wait_prediction_coverage_ratio", "P1"] == 0.875
    assert ("wait_prediction_coverage_ratio", "P0") not in found, "a lane in which nothing was judged has no coverage"
    assert found[("output_prediction_log_error",)] == 0.5


def test_kv_blocks_are_shown_by_state_for_engines_that_tell_them(metrics: Metrics) -> None:
    kv_blocks = KvBlocks(blocks=20, held=6, cached=4, kept=1, span=8, prefix_queries=100, prefix_hits=64)
    metrics.workers.views = lambda: [replace(a_view("gpu-a"), kv_blocks=kv_blocks), a_view("gpu-b")]
    for state, blocks in (("held", 6), ("cached", 3), ("kept", 1), ("empty", 10)):
        assert value(metrics, "engine_kv_blocks", worker="gpu-a", state=state) == blocks
    assert value(metrics, "engine_kv_fragmentation_ratio", worker="gpu-a") == 0.25
    assert value(metrics, "engine_prefix_cache_queries_total", worker="gpu-a") == 100
    assert value(metrics, "engine_prefix_cache_hits_total", worker="gpu-a") == 64
    assert value(metrics, "engine_kv_blocks", worker="gpu-b", state="held") is None


@pytest.mark.parametrize(("phase", "up"), [("starting", 0), ("ready", 1), ("draining", 1), ("down", 0)])
def test_a_worker_is_up_while_it_can_generate(metrics: Metrics, phase: str, up: int) -> None:
    metrics.workers.views = lambda: [a_view("gpu-a", Phase(phase))]
    assert value(metrics, "worker_up", worker="gpu-a") == up


def test_a_configured_worker_that_was_never_seen_is_down(metrics: Metrics) -> None:
    assert value(metrics, "worker_up", worker="gpu-b") == 0


# --- labels


def test_labels_stay_bounded_whatever_clients_and_workers_call_themselves(metrics: Metrics) -> None:
    dice = random.Random(7)

    def everything_happens(model: str, worker: str, code: str) -> None:
        for lane in Lane:
            job = a_job(lane, model)
            attempt = an_attempt(job, done(Usage(1, 1, 1)))
            metrics.queued(attempt, 100.0)
            send(metrics, a_plan(job, worker=worker), 101.0)
            metrics.first_token(attempt, 100.75)
            produce(metrics, lane, 0.01)
            metrics.ended(attempt, 101.0)
        metrics.refused(code)
        views = [a_view(worker, kv_capacity=1), a_view(f"{worker}-2", kv_capacity=1)]
        metrics.workers.views = lambda: views

    everything_happens("stranger", "stranger", "stranger")
    before = set(samples(metrics))
    for _ in range(300):
        name = "".join(dice.choices('abc"\\\n{}=,é', k=8))
        everything_happens(name, name, name)
    assert set(samples(metrics)) == before
    assert value(metrics, "jobs_total", lane="P0", model="other", outcome="done") == 301
    assert value(metrics, "errors_total", code="other") == 301
    assert value(metrics, "batch_size_count", worker="other") == 903
    assert value(metrics, "worker_up", worker="other") == 2


def test_odd_names_in_the_configuration_survive_the_exposition() -> None:
    odd = 'org/mo"del\\v1\nß'
    metrics = Metrics([odd], [odd])
    metrics.ended(an_attempt(a_job(model=odd), done()), 101.0)
    send(metrics, a_plan(a_job(), worker=odd), 101.0)
    assert value(metrics, "jobs_total", lane="P0", model=odd, outcome="done") == 1
    assert value(metrics, "batch_size_count", worker=odd) == 1


def test_two_gateways_in_one_process_do_not_share_counts() -> None:
    one, other = Metrics(["tiny"], []), Metrics(["tiny"], [])
    one.refused("queue_full")
    assert value(one, "errors_total", code="queue_full") == 1
    assert value(other, "errors_total", code="queue_full") == 0


# --- the fast ones


def histograms(seed: int) -> Iterator[tuple[list[float], list[float]]]:
    dice = random.Random(seed)
    for _ in range(50):
        bounds = sorted({dice.choice([0.0, 1.0, 2.5, dice.uniform(-5, 5)]) for _ in range(dice.randrange(1, 12))})
        yield bounds, [dice.choice([*bounds, dice.uniform(-10, 10)]) for _ in range(dice.randrange(200))]


@pytest.mark.parametrize("seed", range(3))
def test_a_fast_histogram_counts_what_is_at_most_each_bound(seed: int) -> None:
    for bounds, values in histograms(seed):
        histogram = FastHistogram(bounds)
        for one in values:
            histogram.observe(one)
        assert histogram.cumulative() == [*(sum(v <= bound for v in values) for bound in bounds), len(values)]
        assert histogram.total == pytest.approx(sum(values))
        assert all(bisect_left(bounds, bound) == index for index, bound in enumerate(bounds))


@pytest.mark.parametrize("bounds", [[], [2.0, 1.0], [1.0, 1.0]])
def test_bounds_that_do_not_rise_are_refused(bounds: list[float]) -> None:
    with pytest.raises(ValueError, match="rise"):
        FastHistogram(bounds)


def test_a_fast_counter_adds() -> None:
    counter = FastCounter()
    counter.add()
    counter.add(2.5)
    assert counter.value == 3.5


def test_no_prompt_can_reach_the_exposition(metrics: Metrics) -> None:
    fields: dict[str, Any] = {"api": "chat", "sampling": Sampling()}
    canary = replace(a_job(), payload=Payload(body=b"canary-7f3a", **fields))
    attempt = an_attempt(canary, done())
    metrics.queued(attempt, 100.0)
    send(metrics, a_plan(canary), 101.0)
    metrics.first_token(attempt, 100.75)
    metrics.ended(attempt, 101.0)
    assert b"canary" not in metrics.render()[0]
