"""Routes, cascades, ensembles and pipelines as versions: applied to a running gateway, tried by run, rolled back."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.run_split import RunSplit
from inferry.ledger.stores.opening import open_queries
from support.tenant_gateway import CHAT, Answer
from support.two_models import TwoModelGateway, chat
from support.waiting import until

PAIR = {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.5}, "shadow": 0}
STRICT = {**PAIR, "accept": {"min_mean_logprob": -0.01}}
PIPELINE = {
    "inputs": {"text": {}},
    "stages": {"answer": {"kind": "generate", "model": "small", "messages": [{"content": "{{ input.text }}"}]}},
}
CONFIG: dict[str, Any] = {
    "routes": {"auto": {"default": "small"}},
    "cascades": {"pair": PAIR},
    "prices": {"small": {"input": 5.0, "output": 5.0}, "large": {"input": 10.0, "output": 10.0}},
    "settings": {"min_runs": 10, "check_interval_s": 0.1},
}
SETTINGS = "/admin/settings"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[TwoModelGateway]:
    with TwoModelGateway(tmp_path, CONFIG) as found:
        yield found


def apply(gateway: TwoModelGateway, share: float | None = None, **sections: Any) -> Answer:
    return gateway.as_admin("POST", SETTINGS, {"sections": sections, "share": share})


def path_of(gateway: TwoModelGateway, model: str, run: str) -> str:
    answer = gateway.call("POST", CHAT, chat(model), {"x-inferry-run-id": run})
    assert answer.status == 200, answer.body
    return answer.headers["x-inferry-path"]


def versions_of_rows(gateway: TwoModelGateway) -> dict[str, set[int | None]]:
    gateway.run(asyncio.to_thread(gateway.service.gateway._recorder.flush, 30))
    with open_queries(gateway.config.ledger) as queries:
        found: dict[str, set[int | None]] = {}
        for job in queries.jobs(limit=1000):
            found.setdefault(job.run_id, set()).add(job.settings_version)
        return found


def test_a_route_and_a_new_cascade_apply_to_the_running_gateway_and_back(gateway: TwoModelGateway) -> None:
    assert path_of(gateway, "auto", "a") == "small"
    routes, cascades = {"auto": {"default": "second"}}, {"pair": PAIR, "second": STRICT}
    assert apply(gateway, routes=routes, cascades=cascades).status == 200
    assert path_of(gateway, "auto", "b") == "second>small>large"
    listed = {one["id"] for one in gateway.call("GET", "/v1/models").json["data"]}
    assert {"auto", "pair", "second"} <= listed
    assert gateway.as_admin("POST", f"{SETTINGS}/rollback", {}).status == 200
    assert path_of(gateway, "auto", "c") == "small"
    assert gateway.call("POST", CHAT, chat("second")).code == "model_not_found"


def test_a_pipeline_applies_to_the_running_gateway_and_back(gateway: TwoModelGateway) -> None:
    call = ("POST", "/v1/pipelines/ask", {"input": {"text": "x"}})
    assert gateway.call(*call).status == 404
    assert apply(gateway, pipelines={"ask": PIPELINE}).status == 200
    assert gateway.call(*call).json["output"] == "Small"
    assert gateway.as_admin("POST", f"{SETTINGS}/rollback", {}).status == 200
    assert gateway.call(*call).status == 404


def test_a_trial_of_a_route_is_sticky_by_run_and_its_rows_have_the_version(gateway: TwoModelGateway) -> None:
    assert apply(gateway, routes={"auto": {"default": "large"}}).status == 200
    assert apply(gateway, 0.5, routes={"auto": {"default": "small"}}).status == 200, "version 1 again"
    split = gateway.as_admin("GET", SETTINGS).json["changes"][0]["split"]
    takes = RunSplit(split["salt"], split["share"]).takes
    runs = [f"run-{number}" for number in range(30)]
    expected = {run: "small" if takes("default", run) else "large" for run in runs}
    assert set(expected.values()) == {"small", "large"}
    for _ in range(2):
        assert {run: path_of(gateway, "auto", run) for run in runs} == expected
    assert versions_of_rows(gateway) == {run: {2 if path == "large" else 1} for run, path in expected.items()}


def test_a_trial_may_add_a_model_and_not_remove_one(gateway: TwoModelGateway) -> None:
    refused = apply(gateway, 0.5, cascades={})
    assert (refused.status, "cascades.pair" in refused.json["error"]["message"]) == (400, True)
    assert apply(gateway, 0.5, cascades={"pair": PAIR, "second": STRICT}).status == 200


def test_a_model_that_no_worker_serves_is_refused(gateway: TwoModelGateway) -> None:
    refused = apply(gateway, routes={"auto": {"default": "missing"}})
    assert (refused.status, "missing" in refused.json["error"]["message"]) == (400, True)


def test_a_dearer_cascade_is_rolled_back_by_its_cost_per_run_and_no_call_fails(gateway: TwoModelGateway) -> None:
    """Unused answers of the small model make the tokens of the worse version cheaper, and its runs dearer."""
    large_only = {"auto": {"default": "large"}}
    assert apply(gateway, routes=large_only).status == 200
    assert apply(gateway, 0.5, routes={"auto": {"default": "pair"}}, cascades={"pair": STRICT}).status == 200
    number = 0
    while gateway.as_admin("GET", SETTINGS).json["candidate"] is not None:
        number += 1
        path_of(gateway, "auto", f"run-{number}")
    reason = gateway.as_admin("GET", SETTINGS).json["changes"][0]["reason"]
    assert reason.startswith("cost per run rose by")


def test_a_dearer_route_that_was_applied_to_all_runs_is_rolled_back_and_no_call_fails(gateway: TwoModelGateway) -> None:
    before = [f"before-{number}" for number in range(20)]
    assert {path_of(gateway, "auto", run) for run in before} == {"small"}
    versions_of_rows(gateway)  # the rows are written
    assert apply(gateway, routes={"auto": {"default": "large"}}).status == 200
    number = 0
    while gateway.as_admin("GET", SETTINGS).json["active"] == 2:
        number += 1
        path_of(gateway, "auto", f"run-{number}")
    history = gateway.as_admin("GET", SETTINGS).json["changes"]
    assert [change["kind"] for change in history] == ["rollback", "apply", "file"]
    assert history[0]["reason"].startswith("cost per run rose by")
    assert path_of(gateway, "auto", "after") == "small"
    compared = gateway.as_admin("GET", f"{SETTINGS}/comparison").json
    assert (compared["kind"], compared["active"], compared["candidate"]) == ("apply", 1, 2)


def test_a_call_that_began_with_a_former_version_ends_with_it(gateway: TwoModelGateway) -> None:
    routes = {"auto": {"classify": {"model": "small", "labels": {"easy": "second"}}, "default": "second"}}
    assert apply(gateway, routes=routes, cascades={"pair": PAIR, "second": PAIR}).status == 200
    gateway.hold.add("small")
    with ThreadPoolExecutor(1) as client:
        waiting = client.submit(gateway.call, "POST", CHAT, chat("auto"))
        until(lambda: len(gateway.upstream.running) == 1)
        assert gateway.as_admin("POST", f"{SETTINGS}/rollback", {}).status == 200
        gateway.hold.clear()
        gateway.run(release(gateway))
        answer = waiting.result(120)
    assert answer.status == 200, answer.body
    assert answer.headers["x-inferry-path"] == "small>second>small"


async def release(gateway: TwoModelGateway) -> None:
    gateway.released.set()
