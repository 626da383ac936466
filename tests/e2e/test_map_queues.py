"""Maps over many elements in a short queue: no element is refused, and nothing is left behind."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.workers import Capacity
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.tenant_gateway import Answer
from support.two_models import TwoModelGateway
from support.waiting import until

ELEMENTS, RUNS, QUEUE_LIMIT = 60, 12, 50
NOTE = {"kind": "generate", "model": "small", "messages": [{"content": "{{ item }}"}]}
PIPELINE = {
    "inputs": {"texts": {"type": "list[text]"}},
    "stages": {"each": {"kind": "map", "over": "{{ input.texts }}", "stages": {"note": NOTE}}},
}


class BusyGateway(TwoModelGateway):
    """Its worker takes two calls at a time."""

    def _workers(self) -> Any:
        settings = HttpWorkerSettings(
            url=self.upstream.url, profile=PROFILES["vllm"], models=("small", "large"), capacity=Capacity(sequences=2)
        )
        return [OpenAIHttpWorker("up", settings, SystemClock(), DEFAULT_LANES)], {}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[BusyGateway]:
    lanes = {"P1": {"queue_limit": QUEUE_LIMIT}}
    with BusyGateway(tmp_path, {"lanes": lanes, "pipelines": {"notes": PIPELINE}}) as found:
        yield found


def test_many_maps_over_many_elements_fit_the_queue(gateway: BusyGateway) -> None:
    gateway.answers["small"] = lambda body: body["messages"][-1]["content"]
    texts = [f"text {number}" for number in range(ELEMENTS)]

    def ask(_: int) -> Answer:
        return gateway.call("POST", "/v1/pipelines/notes", {"input": {"texts": texts}})

    with ThreadPoolExecutor(RUNS) as clients:
        answers = list(clients.map(ask, range(RUNS)))
    assert [one.status for one in answers] == [200] * RUNS, {one.body for one in answers if one.status != 200}
    assert all(one.json["output"] == texts for one in answers)
    loads = gateway.service.app._composed.models.active.pipelines["notes"]._loads  # type: ignore[union-attr]
    until(lambda: (loads[Lane.P1].maps, loads[Lane.P1].jobs) == (0, 0))
