"""Latency by batch size, padding, cost, ticks and lag of the event loop."""

import asyncio

import msgspec
import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.streams import Done, FinishReason, Usage
from inferry.observe.counters import FastHistogram
from inferry.observe.loop_lag import INTERVAL_S, LoopLagProbe
from inferry.observe.metrics import BATCH_SIZES, Metrics
from support.builders import a_job
from support.scripted_worker import ScriptedWorker
from support.virtual_gateway import a_virtual_gateway
from support.virtual_time import run_virtual


def value(metrics: Metrics, series: str) -> float:
    text = metrics.render()[0].decode()
    (found,) = [row for row in text.splitlines() if row.startswith(series + " ")]
    return float(found.rsplit(" ", 1)[1])


def a_plan(*jobs: InferenceJob, worker: str = "w", padded_tokens: int | None = None) -> BatchPlan:
    return BatchPlan(
        plan_id=1,
        worker=worker,
        jobs=jobs,
        reason=ReleaseReason.SIZE,
        formed_at=0.0,
        padded_tokens=padded_tokens,
    )


def send(metrics: Metrics, plan: BatchPlan) -> None:
    for job in plan.jobs:
        attempt = Attempt(job)
        attempt.sent(plan, 0.0)
        metrics.sent(attempt, 0.0)


def end(metrics: Metrics, *, engine_batch: float | None = None, cost_nanos: int | None = None) -> None:
    """A job that arrives at 0 s, has its first token after 2 s and ends after 5 s."""
    attempt = Attempt(a_job(lane=Lane.P0))
    attempt.sent(a_plan(attempt.job), 1.0)
    attempt.first_token(2.0)
    attempt.ended(Done(attempt.job.job_id, FinishReason.STOP, Usage(10, 4, 5)), 5.0)
    entry = attempt.entry(123.0, cost_nanos)
    attempt.ledger_entry = msgspec.structs.replace(entry, engine_batch=engine_batch)
    metrics.ended(attempt, 5.0)


def test_padding_is_what_a_pass_computes_beyond_its_prompts() -> None:
    metrics = Metrics(["m"], ["w", "idle"])
    send(metrics, a_plan(a_job(tokens=10), a_job(tokens=40), a_job(tokens=25), padded_tokens=40))
    assert value(metrics, 'inferry_padded_prompt_tokens_total{worker="w"}') == 75
    assert value(metrics, 'inferry_padding_tokens_total{worker="w"}') == 45
    assert value(metrics, 'inferry_padding_tokens_total{worker="idle"}') == 0


def test_a_worker_that_does_not_pad_has_no_padding() -> None:
    metrics = Metrics(["m"], ["w"])
    send(metrics, a_plan(a_job(tokens=10), a_job(tokens=40)))
    assert value(metrics, 'inferry_padded_prompt_tokens_total{worker="w"}') == 0
    assert value(metrics, 'inferry_padding_tokens_total{worker="w"}') == 0


def test_padding_of_a_worker_that_was_removed_has_no_series() -> None:
    metrics = Metrics(["m"], ["w"])
    metrics.remove_worker("w")
    send(metrics, a_plan(a_job(tokens=10), a_job(tokens=40), padded_tokens=40))
    assert b'inferry_padding_tokens_total{worker="w"}' not in metrics.render()[0]
    assert value(metrics, 'inferry_padding_tokens_total{worker="other"}') == 30


@pytest.mark.parametrize(
    ("engine_batch", "label"),
    [(1.0, "1"), (1.4, "1"), (2.0, "2"), (3.2, "3-4"), (8.4, "5-8"), (33, "33-64"), (900, "65+"), (None, "unknown")],
)
def test_latency_is_known_by_the_size_of_the_engines_batch(engine_batch: float | None, label: str) -> None:
    metrics = Metrics(["m"], ["w"])
    end(metrics, engine_batch=engine_batch)
    for size in BATCH_SIZES:
        series = f'{{lane="P0",model="m",batch="{size}"}}'
        assert value(metrics, f"inferry_e2e_latency_by_batch_seconds_count{series}") == (size == label)
    series = f'{{lane="P0",model="m",batch="{label}"}}'
    assert value(metrics, f"inferry_e2e_latency_by_batch_seconds_sum{series}") == 5.0
    assert value(metrics, f"inferry_time_to_first_token_by_batch_seconds_sum{series}") == 2.0
    assert value(metrics, 'inferry_e2e_latency_seconds_sum{lane="P0",model="m"}') == 5.0


def test_latencies_are_told_apart_by_model_and_unknown_models_share_one_label() -> None:
    metrics = Metrics(["small", "large"], ["w"])
    for model, gaps in (("small", (0.1,)), ("large", (0.2, 0.3)), ("invented", (0.4,)), ("guessed", (0.5,))):
        attempt = Attempt(a_job(lane=Lane.P1, model=model))
        attempt.sent(a_plan(attempt.job), 0.0)
        metrics.sent(attempt, 0.0)
        attempt.first_token(1.0)
        for gap_s in gaps:
            assert attempt.last_token_at is not None
            metrics.produced(attempt, attempt.last_token_at + gap_s)
            attempt.last_token_at += gap_s
    for model, seconds, count in (("small", 0.1, 1), ("large", 0.5, 2), ("other", 0.9, 2)):
        series = f'{{lane="P1",model="{model}"}}'
        assert value(metrics, f"inferry_inter_token_latency_seconds_sum{series}") == pytest.approx(seconds)
        assert value(metrics, f"inferry_inter_token_latency_seconds_count{series}") == count


def test_the_series_of_a_token_are_looked_up_once_per_attempt() -> None:
    metrics = Metrics(["m"], ["w"])
    attempt = Attempt(a_job())
    attempt.sent(a_plan(attempt.job), 0.0)
    metrics.sent(attempt, 0.0)
    attempt.first_token(1.0)
    metrics.produced(attempt, 1.1)
    first = attempt.gap_counts
    assert isinstance(first, FastHistogram)
    for _ in range(9):
        metrics.produced(attempt, 1.1)
        assert attempt.gap_counts is first
    assert sum(first.counts) == 10


def test_latencies_by_batch_size_have_series_for_the_lanes_and_models_in_use_before_a_job_ends() -> None:
    metrics = Metrics([f"model-{number}" for number in range(20)], ["w"])
    name = b"inferry_e2e_latency_by_batch_seconds_count"
    assert metrics.render()[0].count(name) == 0
    send(metrics, a_plan(a_job(lane=Lane.P0, model="model-7")))
    assert metrics.render()[0].count(name) == len(BATCH_SIZES)
    assert value(metrics, f'{name.decode()}{{lane="P0",model="model-7",batch="1"}}') == 0


def test_cost_is_in_units_of_the_currency() -> None:
    metrics = Metrics(["m"], ["w"])
    end(metrics, cost_nanos=1_500_000_000)
    end(metrics, cost_nanos=None)
    assert value(metrics, 'inferry_cost_total{model="m",lane="P0"}') == 1.5


def test_ticks_are_counted_with_the_jobs_they_plan() -> None:
    async def run() -> tuple[float, float, float]:
        async with a_virtual_gateway(ScriptedWorker("w")) as env:
            before = env.metric("inferry_tick_seconds_count")
            streams = [env.submit() for _ in range(3)]
            await env.until(lambda: all(stream.attempt.is_ended for stream in streams))
            planned = env.metric("inferry_tick_jobs_sum")
            return before, env.metric("inferry_tick_seconds_count"), planned

    before, after, planned = run_virtual(run())
    assert after > before
    assert planned == 3, "every job is planned by one tick"


def test_a_callback_that_blocks_the_event_loop_shows_as_lag() -> None:
    async def run() -> FastHistogram:
        now = 0.0
        lag = FastHistogram([0.01, 0.1, 1.0])
        probe = LoopLagProbe(lag, lambda: now)
        probe.start()
        for delay_s in (0.0, 0.0, 0.5, 0.0):
            now += INTERVAL_S + delay_s
            await asyncio.sleep(INTERVAL_S)
            await asyncio.sleep(0)
        probe.close()
        await asyncio.sleep(1.0)
        return lag

    lag = run_virtual(run())
    assert sum(lag.counts) >= 3
    assert lag.counts[2] == 1, "one delay of half a second"
    assert lag.total == pytest.approx(0.5, abs=1e-6)
