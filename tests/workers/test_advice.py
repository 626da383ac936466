"""Advice on engine settings that endanger an SLO target."""

from typing import Any

import pytest

from inferry.cli import worker_wiring
from inferry.cli.config.loader import parse
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.workers.openai_http.advice import EngineFacts, advice
from support.http_jobs import a_call, a_plan, a_worker, run
from support.upstream import Upstream, metrics_page
from support.waiting import async_until

NO_PROMISE = {lane: LanePolicy(max_wait_ms=1, coalesce_ms=1) for lane in Lane}


def messages(lanes: dict[Lane, LanePolicy] = DEFAULT_LANES, **facts: Any) -> list[str]:
    return advice(EngineFacts(worker="w", kind=facts.pop("kind", "vllm"), **facts), lanes)


def test_no_advice_without_facts() -> None:
    assert messages(kind="sglang") == []


def test_a_step_too_long_for_the_itl_target_is_named_with_the_setting() -> None:
    (sentence,) = messages(chunk_tokens=16_384)
    assert sentence == (
        "worker w: a step of 16384 tokens takes 410 ms on a fast GPU, too long for itl_ms 30 of lane P0; "
        "start it with --max-num-batched-tokens 2048"
    )
    assert messages(chunk_tokens=2048) == []
    assert messages({Lane.P0: LanePolicy(max_wait_ms=1, coalesce_ms=1, itl_ms=5.0)}, chunk_tokens=2048) == []
    assert messages(NO_PROMISE, chunk_tokens=16_384) == []
    assert "--max" not in messages(kind="sglang", chunk_tokens=16_384)[0]


def test_a_vllm_of_unknown_step_is_judged_by_its_default() -> None:
    (sentence,) = messages()
    assert sentence.startswith("worker w: chunk_tokens is not set, and vLLM's default is up to 8192: a step of 8192")
    assert sentence.endswith(
        "start it with --max-num-batched-tokens 2048 and set chunk_tokens: 2048, or set chunk_tokens to the step it has"
    )
    assert messages(decodes=False) == []  # no live stream waits for its steps
    assert messages(NO_PROMISE) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"max_sequences": 256, "engine_sequences": 64}, "set max_sequences: 64"),
        ({"max_sequences": 4096, "chunk_tokens": 2048}, "set max_sequences: 2048 or less"),
        ({"prefill_tokens": 512, "chunk_tokens": 2048}, "set prefill_tokens: 2048 or more"),
        ({"kv_tokens": 10_000, "kv_capacity": 8_000}, "set kv_tokens: 8000"),
        ({"preempts": True}, "its KV cache is full"),
        ({"has_metrics": False}, "the server has no metrics"),
        ({"supports_priority": False}, "--scheduling-policy priority"),
        ({"reports_cached": False}, "--enable-prompt-tokens-details"),
    ],
)
def test_every_setting_that_stands_in_the_way_is_named(facts: dict[str, Any], words: str) -> None:
    (sentence,) = messages(**{"chunk_tokens": 2048, **facts})
    assert words in sentence


@pytest.mark.parametrize(
    "facts",
    [
        {"max_sequences": 64, "engine_sequences": 64},
        {"max_sequences": 256, "chunk_tokens": 2048},
        {"prefill_tokens": 4096, "chunk_tokens": 2048},
        {"kv_tokens": 8_000, "kv_capacity": 8_000},
        {"has_metrics": True, "supports_priority": True, "reports_cached": True},
        {"kind": "tgi", "supports_priority": False, "reports_cached": False},
    ],
)
def test_correct_settings_give_no_advice(facts: dict[str, Any]) -> None:
    assert messages(**{"chunk_tokens": 2048, **facts}) == []


def test_the_configuration_alone_gives_advice() -> None:
    vllm = {"kind": "vllm", "name": "gpu-a", "url": "http://h:1", "chunk_tokens": 16_384}
    assert [one.split(":")[0] for one in worker_wiring.advise(parse({"workers": [vllm]}))] == ["worker gpu-a"]
    quiet = {"lanes": {"P0": {"ttft_ms": None, "itl_ms": None}, "P1": {"ttft_ms": None, "itl_ms": None}}}
    assert worker_wiring.advise(parse({"workers": [vllm], **quiet})) == []
    assert worker_wiring.advise(parse({})) == []
    unknown = {name: value for name, value in vllm.items() if name != "chunk_tokens"}
    (sentence,) = worker_wiring.advise(parse({"workers": [unknown]}))
    assert "chunk_tokens is not set" in sentence
    split = [
        {**unknown, "role": "prefill"},
        {**vllm, "name": "gpu-b", "url": "http://h:2", "chunk_tokens": 2048, "role": "decode"},
    ]
    assert worker_wiring.advise(parse({"workers": split})) == []


def test_live_engines_are_asked() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            up.accepts_priorities = False
            worker = {"kind": "vllm", "name": "gpu-a", "url": up.url, "kv_tokens": 99_999, "chunk_tokens": 2048}
            config = parse({"workers": [worker, {**worker, "name": "gone", "url": "http://127.0.0.1:9"}]})
            sentences = await worker_wiring.query_engines(config)
            assert "set kv_tokens: 16000" in sentences[0]
            assert "--scheduling-policy priority" in sentences[1]
            assert sentences[2].startswith("worker gone: the server cannot be reached")

    run(scenario())


def test_advice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            worker = a_worker(up, chunk_tokens=2048)
            await worker.start()
            assert not caplog.records
            for number in range(3):
                await worker.run(a_plan(a_call(f"j{number}")), lambda item: None)
                up.metrics_page = metrics_page(1, more=f"vllm:num_preemptions_total {number + 1}.0\n")
                await worker._poller.poll()  # type: ignore[union-attr]
            await async_until(lambda: caplog.records)
            await worker.close()

    with caplog.at_level("WARNING"):
        run(scenario())
    assert sorted(record.getMessage().split(",")[0].split(";")[0] for record in caplog.records) == [
        "worker up: the engine preempts sequences because its KV cache is full",
        "worker up: the server does not report cached tokens",
    ]
