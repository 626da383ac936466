"""Parameters of a call exactly at their bounds, and zeros that mean something."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.domain.callers import ANONYMOUS
from inferry.domain.clock import SystemClock
from inferry.domain.errors import ContextLengthExceeded, GatewayError, InvalidRequest
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ports import ModelCard
from inferry.ingress.job_parser import parse
from inferry.ingress.openai.decode import MAX_STOP_STRINGS, ChatEndpoint, decode_completion
from inferry.ingress.wire_format import OPENAI, ClientRequest
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.loop_helpers import ListLedger
from support.scripted_worker import ScriptedWorker

CONTEXT, VOCABULARY = 64, 100


class Carded(ScriptedWorker):
    def cards(self) -> Sequence[ModelCard]:
        features = frozenset({"n", "logprobs", "penalties", "min_p", "min_tokens"})
        return [ModelCard(name="m", context_tokens=CONTEXT, vocab_size=VOCABULARY, features=features)]


def a_gateway() -> Gateway:
    clock, recorder = SystemClock(), Recorder(ListLedger())
    metrics = Metrics(["m"], ["scripted"])
    return make_gateway(
        lanes=DEFAULT_LANES, pool=Pool([Carded()], clock), recorder=recorder, metrics=metrics, clock=clock
    )


def a_job(api: Any = "chat", headers: dict[bytes, bytes] | None = None, **fields: Any) -> InferenceJob:
    async def parsed() -> InferenceJob:
        gateway = a_gateway()
        given = {"messages": [{"role": "user", "content": "hi"}]} if api == "chat" else {"prompt": [1, 2, 3]}
        body = msgspec.json.encode({"model": "m", **given, **fields})
        try:
            is_chat = api == "chat"
            request = ChatEndpoint().decode(body) if is_chat else ClientRequest(decode_completion(body), body, OPENAI)
            job = parse(request, headers or {}, gateway.models, ANONYMOUS)
        finally:
            await gateway.close()
        assert isinstance(job, InferenceJob)
        return job

    return asyncio.run(parsed())


def refused(error: type[GatewayError], param: str, api: Any = "chat", **fields: Any) -> None:
    with pytest.raises(error) as caught:
        a_job(api, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "temperature"),
    [({}, 1.0), ({"temperature": 0}, 0.0), ({"temperature": 1e-6}, 0.0), ({"temperature": 2}, 2)],
)
def test_a_temperature_of_zero_is_the_best_token_and_two_is_the_highest(given: Any, temperature: float) -> None:
    assert a_job(**given).payload.sampling.temperature == temperature
    refused(InvalidRequest, "temperature", temperature=2.001)
    refused(InvalidRequest, "temperature", temperature=-0.001)


@pytest.mark.parametrize(("top_k", "kept"), [(-1, None), (0, None), (1, 1), (None, None)])
def test_a_top_k_of_zero_is_no_limit(top_k: int | None, kept: int | None) -> None:
    assert a_job(top_k=top_k).payload.sampling.top_k == kept


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_a_seed_of_zero_is_a_seed_and_it_may_have_64_bits(seed: int) -> None:
    assert a_job(seed=seed).payload.sampling.seed == seed
    refused(InvalidRequest, "seed", seed=2**63)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_is_at_least_one(name: str) -> None:
    assert a_job("chat", None, **{name: 1}).token_budget == 1
    refused(InvalidRequest, name, "chat", **{name: 0})


def test_up_to_128_choices_may_be_asked_for_and_each_may_write_the_limit() -> None:
    job = a_job(n=128, max_tokens=5)
    assert (job.payload.choices, job.token_budget, job.payload.output_limit) == (128, 5, 640)
    refused(InvalidRequest, "n", n=129)
    refused(InvalidRequest, "n", n=0)


def test_up_to_sixteen_stop_strings_of_up_to_1024_characters_may_be_given() -> None:
    stops = [f"{number}".ljust(1024, "x") for number in range(MAX_STOP_STRINGS)]
    assert a_job(stop=stops).payload.sampling.stop == tuple(stops)
    refused(InvalidRequest, "stop", stop=[*stops, "one more"])
    refused(InvalidRequest, "stop", stop="x" * 1025)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: Any) -> None:
    refused(InvalidRequest, "stop", stop=stop)


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_strings_may_be_given_as_null_or_as_an_empty_list(stop: Any) -> None:
    assert a_job(stop=stop).payload.sampling.stop == ()


def test_prompt_and_answer_may_fill_the_context_and_one_token_must_be_left_for_the_answer() -> None:
    assert a_job("completions", prompt=[1] * 60, max_tokens=4).token_budget == 4
    assert a_job("completions", prompt=[1] * 63).token_budget == 1
    refused(ContextLengthExceeded, "max_tokens", "completions", prompt=[1] * 60, max_tokens=5)
    refused(ContextLengthExceeded, "prompt", "completions", prompt=[1] * 64)


def test_token_ids_go_from_zero_to_the_last_of_the_vocabulary() -> None:
    assert a_job("completions", prompt=[0, VOCABULARY - 1]).payload.prompt_ids == (0, VOCABULARY - 1)
    refused(InvalidRequest, "prompt", "completions", prompt=[VOCABULARY])
    refused(InvalidRequest, "prompt", "completions", prompt=[-1])


def test_zero_max_wait_and_zero_deadline_are_taken_literally() -> None:
    job = a_job(headers={b"x-inferry-max-wait-ms": b"0", b"x-inferry-deadline-ms": b"0"})
    assert (job.max_wait_s, job.deadline) == (0.0, job.arrived_at)
    unsaid = a_job()
    assert unsaid.max_wait_s == DEFAULT_LANES[unsaid.lane].max_wait_ms / 1000
    assert unsaid.deadline is None


def test_a_call_may_say_how_much_time_its_prompt_adds_to_the_target() -> None:
    prompt = [1] * 50
    assert a_job("completions", prompt=prompt, max_tokens=4).ttft_allowance_s == 0.0
    allowed = a_job("completions", prompt=prompt, max_tokens=4, headers={b"x-inferry-ttft-ms-per-1k-tokens": b"200"})
    assert allowed.ttft_allowance_s == pytest.approx(0.2 * allowed.footprint.prefill_tokens / 1000)


def test_a_refused_call_leaves_nothing_behind_that_later_calls_are_estimated_by() -> None:
    async def parsed() -> None:
        gateway = a_gateway()
        body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "word " * 1000}]})
        call = ChatEndpoint().decode(body)
        try:
            with pytest.raises(InvalidRequest):
                parse(call, {b"x-inferry-replay": b"sometimes"}, gateway.models, ANONYMOUS)
            first, second = (parse(call, {}, gateway.models, ANONYMOUS) for _ in range(2))
        finally:
            await gateway.close()
        assert isinstance(first, InferenceJob)
        assert isinstance(second, InferenceJob)
        assert first.footprint.cached.high == 0 < second.footprint.cached.high

    asyncio.run(parsed())
