"""The metrics page of an engine, and the load estimate between two readings."""

import asyncio

import pytest

from inferry.domain.streams import Item
from inferry.domain.workers import EngineCounts, Load
from inferry.workers.openai_http.load_estimate import FOREIGN_LOAD_SNAPSHOTS, STALE_S, LoadEstimate, excess
from inferry.workers.openai_http.metrics_parser import MetricsSnapshot, StepCounters, read_metrics
from inferry.workers.openai_http.profiles import SGLANG, TGI, VLLM
from support.http_jobs import a_call, a_plan, a_worker, done, ran, run
from support.token_server import TokenServer
from support.upstream import Upstream, metrics_page
from support.waiting import async_until

assert VLLM.metrics is not None
assert SGLANG.metrics is not None
assert TGI.metrics is not None
BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, float("inf"))


def histogram(counts: dict[float, int], tokens: float, engine: int = 0) -> str:
    total, lines = 0, []
    for bound in BOUNDS:
        total += counts.get(bound, 0)
        le = "+Inf" if bound == float("inf") else str(bound)
        labels = f'engine="{engine}",le="{le}",model_name="m"'
        lines.append(f"vllm:iteration_tokens_total_bucket{{{labels}}} {total}.0\n")
    lines.append(f'vllm:iteration_tokens_total_count{{engine="{engine}",model_name="m"}} {total}.0\n')
    lines.append(f'vllm:iteration_tokens_total_sum{{engine="{engine}",model_name="m"}} {tokens}\n')
    lines.append(f'vllm:iteration_tokens_total_created{{engine="{engine}",model_name="m"}} 1.79e+09\n')
    return "".join(lines)


def steps(counts: dict[float, int], tokens: float) -> StepCounters:
    snapshot = read_metrics(metrics_page(0, more=histogram(counts, tokens)).encode(), VLLM.metrics)  # type: ignore[arg-type]
    assert snapshot is not None
    assert snapshot.steps is not None
    return snapshot.steps


def test_a_page_of_vllm_is_read() -> None:
    more = (
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.45e+02\n'
        'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0\n'
        'vllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n' + histogram({1.0: 4, 16.0: 6}, 90.0)
    )
    page = metrics_page(12, 5, kv_usage=0.25, more=more)
    snapshot = read_metrics(page.encode(), VLLM.metrics)  # type: ignore[arg-type]
    assert snapshot is not None
    assert (snapshot.running, snapshot.waiting, snapshot.sequences) == (12, 5, 17)
    assert (snapshot.kv_capacity, snapshot.kv_tokens) == (16_000, 4_000)
    assert (snapshot.prefix_hits, snapshot.preemptions) == (145, 3)
    assert snapshot.steps is not None
    assert (snapshot.steps.count, snapshot.steps.tokens) == (10, 90)


def test_engines_of_one_server_are_added_up() -> None:
    page = (
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\nvllm:num_requests_waiting{engine="1"} 4.0 1794714701000\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="1600",num_gpu_blocks="None"} 1.0\n'
    )
    snapshot = read_metrics(page.encode(), VLLM.metrics)  # type: ignore[arg-type]
    assert snapshot is not None
    assert (snapshot.running, snapshot.waiting, snapshot.kv_capacity) == (5, 4, 3200)
    assert snapshot.kv_usage == pytest.approx(0.3)


def test_pages_of_other_kinds_are_read() -> None:
    sglang = (
        "# HELP sglang:num_running_reqs The number of running requests.\n# TYPE sglang:num_running_reqs gauge\n"
        'sglang:num_running_reqs{model_name="m"} 7.0\nsglang:num_running_reqs_offline_batch{model_name="m"} 9.0\n'
        'sglang:num_queue_reqs{model_name="m"} 2.0\nsglang:token_usage{model_name="m"} 0.5\n'
        'sglang:max_total_num_tokens{model_name="m"} 454942.0\n'
    )
    snapshot = read_metrics(sglang.encode(), SGLANG.metrics)  # type: ignore[arg-type]
    assert snapshot == MetricsSnapshot(running=7, waiting=2, kv_usage=0.5, kv_capacity=454_942)
    tgi = (
        "# TYPE tgi_batch_current_size gauge\ntgi_batch_current_size 4\n# TYPE tgi_queue_size gauge\ntgi_queue_size 1\n"
    )
    assert read_metrics(tgi.encode(), TGI.metrics) == MetricsSnapshot(running=4, waiting=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>not here</html>",
        b"\x00\xff\xfe" * 1000,
        b"vllm:num_requests_running",
        b"vllm:num_requests_running{\nvllm:num_requests_waiting}",
        b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running -3\nvllm:num_requests_waiting 1\n",
        b"# vllm:num_requests_running 3\n# vllm:num_requests_waiting 1\n",
    ],
)
def test_garbage_gives_no_snapshot(page: bytes) -> None:
    assert read_metrics(page, VLLM.metrics) is None  # type: ignore[arg-type]


def test_a_page_that_is_half_garbage_is_read_as_far_as_it_goes() -> None:
    garbage = 'vllm:iteration_tokens_total_bucket{le="many"} 3\nvllm:iteration_tokens_total_sum x\n'
    page = metrics_page(1, more=garbage) + 'vllm:cache_config_info{block_size="x"} 1\n'
    snapshot = read_metrics(page.encode(), VLLM.metrics)  # type: ignore[arg-type]
    assert snapshot is not None
    assert (snapshot.running, snapshot.steps) == (1, None)


# -- whose load it is ------------------------------------------------------------------------------------------------


def test_a_few_extra_calls_are_a_race_and_many_are_foreign_load() -> None:
    assert excess(MetricsSnapshot(running=10, waiting=0), own_calls=8) == Load()
    assert excess(MetricsSnapshot(running=104, waiting=0), own_calls=98) == Load()
    assert excess(MetricsSnapshot(running=10, waiting=4, kv_usage=0.5, kv_capacity=1000), own_calls=4) == Load(
        6, 4, 300
    )
    assert excess(MetricsSnapshot(running=2, waiting=9), own_calls=4) == Load(0, 7, 0)


def test_load_is_foreign_only_when_it_stays() -> None:
    estimate = LoadEstimate()
    for now in range(FOREIGN_LOAD_SNAPSHOTS - 1):
        estimate.update(MetricsSnapshot(running=20, waiting=0), 5, float(now))
    assert estimate.foreign(3.0) == Load()
    estimate.update(MetricsSnapshot(running=18, waiting=0), 5, 4.0)
    assert estimate.foreign(4.0) == Load(running=13)
    estimate.update(MetricsSnapshot(running=5, waiting=0), 5, 5.0)
    assert estimate.foreign(5.0) == Load()


def test_a_stale_snapshot_is_ignored() -> None:
    estimate = LoadEstimate()
    estimate.update(MetricsSnapshot(running=20, waiting=3), 5, 10.0)
    assert estimate.load(5, 10.0 + STALE_S / 2) == Load(20, 3)
    assert estimate.load(5, 10.0 + 2 * STALE_S) == Load(running=5)


def test_calls_waiting_beside_a_free_cache_reveal_the_sequence_limit() -> None:
    estimate = LoadEstimate()
    for now in range(5):
        estimate.update(MetricsSnapshot(running=16, waiting=4, kv_usage=0.1), 20, float(now))
    assert estimate.engine_sequences is None
    estimate.update(MetricsSnapshot(running=16, waiting=1, kv_usage=0.1), 20, 6.0)
    assert estimate.engine_sequences == 16
    busy = LoadEstimate()
    for now in range(20):
        busy.update(MetricsSnapshot(running=16 + now % 3, waiting=4, kv_usage=0.1), 20, float(now))
    assert busy.engine_sequences is None  # they wait for their prompts
    full = LoadEstimate()
    for now in range(9):
        full.update(MetricsSnapshot(running=16, waiting=4, kv_usage=0.97), 20, float(now))
    assert full.engine_sequences is None  # it waits for cache, not for a place


# -- on a worker -----------------------------------------------------------------------------------------------------


def test_a_view_shows_the_engines_metrics() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.01)) as up:
            worker, items = a_worker(up), list[Item]()
            await worker.start()
            assert worker.view().kv_capacity == 16_000
            up.foreign = 30
            running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), items.append))
            await async_until(lambda: worker.view().foreign.running >= 29)
            assert worker.view().load.running == 31
            up.foreign = 0
            await async_until(lambda: worker.view().foreign == Load())
            await worker.close()
            await running

    run(scenario())


def test_a_view_shows_the_engines_counters() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            written = 'vllm:generation_tokens_total{engine="0",model_name="m"} 120.0\n'
            up.metrics_page = metrics_page(1, more=histogram({2048.0: 40}, 9_120) + written)
            worker = a_worker(up)
            await worker.start()
            await async_until(lambda: worker.view().counts is not None)
            assert worker.view().counts == EngineCounts(40, 9_000, 120)
            assert worker.view().counted_at is not None
            await worker.close()

    run(scenario())


def test_metrics_that_turn_to_garbage_change_nothing() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.05)) as up:
            worker, items = a_worker(up), list[Item]()
            await worker.start()
            up.metrics_page = "vllm:num_requests_running{ 17\n\x00\x00"
            await worker.run(a_plan(a_call(tokens=20)), items.append)
            done(items)
            assert worker.view().kv_capacity == 16_000
            assert worker.view().foreign == Load()
            await worker.close()

    run(scenario())


def test_a_server_without_metrics_is_as_good_as_ever() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            up.shows_metrics = False
            done(await ran(up))

    run(scenario())
