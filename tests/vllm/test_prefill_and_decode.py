"""Two real servers that hand KV over through NIXL: one computes prompts, the other decodes."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.gateway_process import GatewayProcess
from support.serving import free_port, post
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
TRANSFERRED = 'source="external_kv_transfer"'
COMPUTED = 'source="local_compute"'
Pair = tuple[VllmServer, VllmServer]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The prefill server and the decode server."""
    scratch = tmp_path_factory.mktemp("pair")
    made = [
        VllmServer(
            model,
            scratch / f"{name}.log",
            *("--kv-transfer-config", json.dumps(CONNECTOR)),
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            UCX_TLS="tcp,self,sm",
        )
        for name in ("prefill", "decode")
    ]
    with ExitStack() as stack:
        for server in made:
            stack.callback(server.stop)
            server.begin()
        for server in made:
            server.wait()
        yield made[0], made[1]


@pytest.fixture
def gateway(pair: Pair, tmp_path: Path) -> Iterator[GatewayProcess]:
    prefill, decode = pair
    config = {
        "workers": [
            {"kind": "vllm", "name": "p", "url": prefill.url, "role": "prefill", "min_prefill_tokens": 200},
            {"kind": "vllm", "name": "d", "url": decode.url, "role": "decode"},
        ]
    }
    with GatewayProcess(tmp_path / "gateway", config) as running:
        yield running


def a_call(seed: int, tokens: int = 400) -> dict[str, Any]:
    """A greedy call with a prompt of ids that no other seed shares."""
    prompt = [20 + (seed * 131 + place * (7 + seed)) % 900 for place in range(tokens)]
    return {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}


def answer(url: str, call: dict[str, Any]) -> dict[str, Any]:
    status, _, whole = post(url, "/v1/completions", call)
    assert status == 200, whole
    return {"text": whole["choices"][0]["text"], "usage": {**whole["usage"], "prompt_tokens_details": None}}


def test_answers_equal_those_of_one_server_and_no_prompt_is_computed_twice(pair: Pair, gateway: GatewayProcess) -> None:
    prefill, decode = pair
    transferred, computed = (decode.metric(PROMPT_TOKENS, one) for one in (TRANSFERRED, COMPUTED))
    calls = [a_call(seed) for seed in range(1, 9)]
    answers = [answer(gateway.url, call) for call in calls]
    assert decode.metric(PROMPT_TOKENS, TRANSFERRED) - transferred == 8 * 400
    assert decode.metric(PROMPT_TOKENS, COMPUTED) == computed
    assert gateway.metric_by_label("inferry_prefills_total") == {'{worker="p",result="handed_over"}': 8}
    assert answers == [answer(prefill.url, call) for call in calls]


def test_a_short_prompt_is_computed_where_it_is_decoded(pair: Pair, gateway: GatewayProcess) -> None:
    prefill, _ = pair
    before = prefill.metric("vllm:prompt_tokens_total")
    answer(gateway.url, a_call(21, tokens=100))
    assert prefill.metric("vllm:prompt_tokens_total") == before


def test_calls_go_on_while_the_prefill_server_is_gone_and_when_it_is_back(pair: Pair, gateway: GatewayProcess) -> None:
    prefill, decode = pair
    prefill.send_signal(signal.SIGKILL)
    prefill.stop()
    calls = [a_call(seed) for seed in range(31, 35)]
    alone = [answer(gateway.url, call) for call in calls]
    prefill.start()
    gateway.until(lambda: all(up == 1 for up in gateway.metric_by_label("inferry_worker_up").values()), 120)
    transferred = decode.metric(PROMPT_TOKENS, TRANSFERRED)
    answer(gateway.url, a_call(41))
    assert decode.metric(PROMPT_TOKENS, TRANSFERRED) - transferred == 400
    assert alone == [answer(prefill.url, call) for call in calls]
