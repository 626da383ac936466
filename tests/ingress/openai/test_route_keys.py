"""The route and batch key of a call: model, adapter, the required precision, and its length where the lane asks."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.domain.callers import Caller
from inferry.domain.clock import SystemClock
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ports import ModelCard
from inferry.domain.routes import BatchKey, OutputLength, RouteKey
from inferry.domain.tenants import ApiKey, Limits, Tenant
from inferry.domain.values import replace
from inferry.ingress.job_parser import parse
from inferry.ingress.openai.decode import decode_completion
from inferry.ingress.wire_format import OPENAI, ClientRequest
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.loop_helpers import ListLedger
from support.scripted_worker import ScriptedWorker


class Tuned(ScriptedWorker):
    def cards(self) -> Sequence[ModelCard]:
        return [ModelCard(name="m"), ModelCard(name="lora", parent="m")]


def a_call(
    model: str = "m",
    *,
    precision: str | None = None,
    key_precision: str | None = None,
    max_tokens: int = 8,
    long_output_tokens: int | None = None,
    ttft_ms: float | None = 2000,
    **fields: str,
) -> InferenceJob:
    tenant = Tenant(name="t", limits=Limits(precision=precision))
    key = ApiKey(key_id="k", tenant="t", secret_hash=b"", limits=Limits(precision=key_precision))
    policy = replace(DEFAULT_LANES[Lane.P1], long_output_tokens=long_output_tokens, ttft_ms=ttft_ms)
    lanes = DEFAULT_LANES | {Lane.P1: policy}

    async def parsed() -> InferenceJob:
        clock = SystemClock()
        gateway = make_gateway(
            lanes=lanes,
            pool=Pool([Tuned()], clock),
            recorder=Recorder(ListLedger()),
            metrics=Metrics(["m"], ["scripted"]),
            clock=clock,
        )
        body = msgspec.json.encode({"model": model, "prompt": [1, 2], "max_tokens": max_tokens, **fields})
        try:
            job = parse(ClientRequest(decode_completion(body), body, OPENAI), {}, gateway.models, Caller(tenant, key))
        finally:
            await gateway.close()
        assert isinstance(job, InferenceJob)
        return job

    return asyncio.run(parsed())


def test_a_plain_call_names_its_model_only() -> None:
    assert a_call().route == RouteKey("m")


def test_the_keys_of_an_adapter_name_it() -> None:
    job = a_call("lora")
    assert job.route == RouteKey("lora", adapter="lora")
    assert job.batch_key == BatchKey(job.route)


@pytest.mark.parametrize(
    ("tenant", "key", "required"),
    [(None, None, None), ("bf16", None, "bf16"), (None, "fp8", "fp8"), ("bf16", "fp8", "fp8")],
)
def test_the_precision_is_that_of_the_key_or_else_of_the_tenant(
    tenant: str | None, key: str | None, required: str | None
) -> None:
    assert a_call(precision=tenant, key_precision=key).route.precision == required


@pytest.mark.parametrize(
    ("long_output_tokens", "max_tokens", "length"), [(None, 30, None), (20, 30, "long"), (20, 8, "short")]
)
def test_the_lane_decides_whether_a_call_is_short_or_long(
    long_output_tokens: int | None, max_tokens: int, length: OutputLength | None
) -> None:
    assert a_call(max_tokens=max_tokens, long_output_tokens=long_output_tokens).route.length == length


@pytest.mark.parametrize(("ttft_ms", "is_batch"), [(2000.0, False), (None, True)])
def test_a_call_is_batch_work_where_its_lane_has_no_target(ttft_ms: float | None, is_batch: bool) -> None:
    assert a_call(ttft_ms=ttft_ms).is_batch is is_batch


def test_the_payload_has_the_clients_own_cache_salt() -> None:
    assert a_call(cache_salt="mine").payload.cache_salt == "mine"
    assert a_call().payload.cache_salt is None
