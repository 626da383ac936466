"""`service_tier` end to end: it selects a lane, is capped by the key, and is in every event."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES
from inferry.ledger.stores.opening import open_queries
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.serving import Serving, post
from support.upstream import Upstream

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "once"}]
TIERS = [("priority", "P0"), ("default", "P1"), ("flex", "P2")]


class BeforeAServer(Serving):
    """A gateway whose worker speaks for itself: its events pass through. Both run on the gateway's loop."""

    def __init__(self, directory: Path) -> None:
        self._upstream = Upstream()
        super().__init__(
            directory, self._workers, {"tenants": {"modest": {"max_lane": "P1"}, "batch": {"max_lane": "P2"}}}
        )

    def _workers(self) -> tuple[list[OpenAIHttpWorker], dict[str, Any]]:
        settings = HttpWorkerSettings(url=self._upstream.url, profile=PROFILES["vllm"], models=("m",))
        return [OpenAIHttpWorker("up", settings, SystemClock(), DEFAULT_LANES)], {}

    async def _main(self) -> None:
        async with self._upstream:
            await super()._main()


@pytest.fixture(scope="module")
def over_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with BeforeAServer(tmp_path_factory.mktemp("tiers")) as gateway:
        yield gateway


def ask(
    gateway: Serving, model: str, tier: str, *, stream: bool, tenant: str = "default"
) -> tuple[dict[str, str], Any]:
    body = {"model": model, "messages": HELLO, "max_tokens": 4, "service_tier": tier, "stream": stream}
    status, headers, answer = post(gateway.url, CHAT, body, {"x-inferry-tenant": tenant})
    assert status == 200, answer
    return headers, answer


def tiers_in(stream: str) -> list[str]:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["service_tier"] for event in events[:-1]]


@pytest.mark.parametrize(("tier", "lane"), TIERS)
@pytest.mark.parametrize("served_by", ["over HTTP", "embedded"])
def test_the_tier_is_the_lane_in_every_chunk(
    served_by: str, tier: str, lane: str, over_http: Serving, real: Serving
) -> None:
    gateway, model = (over_http, "m") if served_by == "over HTTP" else (real, "tiny")
    headers, answer = ask(gateway, model, tier, stream=False)
    assert headers["x-inferry-lane"] == lane
    assert answer["service_tier"] == tier
    headers, answer = ask(gateway, model, tier, stream=True)
    assert headers["x-inferry-lane"] == lane
    told = tiers_in(answer)
    assert len(told) >= 3
    assert set(told) == {tier}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tier_above_the_callers_lane_is_lowered_and_reported(over_http: Serving, stream: bool) -> None:
    headers, answer = ask(over_http, "m", "priority", stream=stream, tenant="modest")
    assert headers["x-inferry-lane"] == "P1"
    assert (set(tiers_in(answer)) if stream else {answer["service_tier"]}) == {"default"}


@pytest.mark.parametrize(("tenant", "lane", "granted"), [("modest", "P1", "default"), ("batch", "P2", "flex")])
def test_no_call_runs_above_max_lane(tmp_path: Path, tenant: str, lane: str, granted: str) -> None:
    """A tier is a preference and is lowered. A lane header is an instruction and is refused."""
    with BeforeAServer(tmp_path) as gateway:
        for tier, expected in (("priority", (lane, granted)), ("default", (lane, granted)), ("flex", ("P2", "flex"))):
            headers, answer = ask(gateway, "m", tier, stream=False, tenant=tenant)
            assert (headers["x-inferry-lane"], answer["service_tier"]) == expected
        body = {"model": "m", "messages": HELLO, "service_tier": "flex"}
        status, _, answer = post(gateway.url, CHAT, body, {"x-inferry-tenant": tenant, "x-inferry-lane": "P0"})
        assert (status, answer["error"]["code"]) == (403, "lane_not_allowed")
    with open_queries(gateway.config.ledger) as ledger:
        assert sorted(row.lane for row in ledger.jobs(tenant=tenant)) == [lane, lane, "P2"]


def test_auto_is_the_callers_own_lane(over_http: Serving) -> None:
    headers, answer = ask(over_http, "m", "auto", stream=False)
    assert (headers["x-inferry-lane"], answer["service_tier"]) == ("P1", "default")


def test_a_call_without_a_tier_gets_none(over_http: Serving) -> None:
    _, _, answer = post(over_http.url, CHAT, {"model": "m", "messages": HELLO})
    assert "service_tier" not in answer


def test_an_unknown_tier_is_refused(real: Serving) -> None:
    with (
        openai.OpenAI(base_url=real.url + "/v1", api_key="unused") as api,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        api.completions.create(model="tiny", prompt="once", extra_body={"service_tier": "platinum"})
    assert refused.value.param == "service_tier"
