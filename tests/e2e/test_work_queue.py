"""Async jobs and batches over gateways that share Redis, and pull-workers: every item has one result."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from inferry.domain.ledger import Outcome
from inferry.ledger.stores.opening import open_queries
from support.children import environment
from support.redis_server import RedisServer
from support.serving import get, post
from support.sharing_gateways import GatewayChild, an_engine
from support.waiting import until

CHAT = "/v1/chat/completions"
KEY = "the key of all pull-workers"
MESSAGES = [{"role": "user", "content": "hi"}]


class PullWorkerChild:
    """`inferry worker` in a directory of its own."""

    def __init__(self, directory: Path, redis_url: str, gateways: list[str], *options: str, key: str = KEY) -> None:
        directory.mkdir()
        self.log = directory / "log"
        command = [sys.executable, "-m", "inferry", "worker", "--redis", redis_url, "--concurrency", "8", *options]
        for url in gateways:
            command += ["--gateway", url]
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                command, cwd=directory, stdout=log, stderr=subprocess.STDOUT, env=environment(INFERRY_WORKER_KEY=key)
            )

    def is_ready(self) -> bool:
        assert self.popen.poll() is None, self.log.read_text()
        return "pulling work" in self.log.read_text()

    def stop(self, number: int) -> None:
        self.popen.send_signal(number)
        self.popen.wait(timeout=120)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(timeout=120)


@contextmanager
def gateways(
    directory: Path, redis: RedisServer, ledger: str, engine: str, count: int, more: dict[str, Any] | None = None
) -> Iterator[list[GatewayChild]]:
    os.environ["WORKER_KEY"] = KEY
    config = {
        "ledger": ledger,
        "cluster": {"redis": redis.url, "pull_models": ["far"], "worker_key_env": "WORKER_KEY"},
        "workers": [{"kind": "vllm", "name": "engine", "url": engine, "models": ["m"]}],
        **(more or {}),
    }
    with ExitStack() as stack:
        children = [GatewayChild(directory / f"gateway-{number}", config) for number in range(count)]
        for child in children:
            stack.callback(child.kill)
        for child in children:
            until(child.is_ready, problem=child.log.read_text)
        yield children


def url_of(gateway: GatewayChild) -> str:
    return f"http://127.0.0.1:{gateway.port}"


def create_jobs(gateway: GatewayChild, count: int, model: str = "m", tokens: int = 3) -> list[str]:
    ids = []
    for number in range(count):
        messages = [{"role": "user", "content": f"q{number}"}]
        body = {"model": model, "messages": messages, "max_tokens": tokens}
        status, _, answer = post(url_of(gateway), "/v1/jobs", {"endpoint": CHAT, "body": body})
        assert status == 202, answer
        ids.append(str(answer["id"]))
    return ids


def status_of(gateway: GatewayChild, id: str) -> str:
    return str(get(url_of(gateway), f"/v1/jobs/{id}")[2]["status"])


def await_completed(gateway: GatewayChild, ids: list[str]) -> None:
    for id in ids:
        until(lambda id=id: status_of(gateway, id) != "in_progress", problem=gateway.log.read_text, every_s=0.05)  # type: ignore[misc]
    assert Counter(status_of(gateway, id) for id in ids) == {"completed": len(ids)}


def charged(ledger: str) -> Counter[str]:
    """Successful calls by the work that they belong to."""
    with open_queries(ledger) as queries:
        rows = queries.jobs(limit=100_000)
    return Counter(row.job_id.rpartition("-")[0] for row in rows if row.outcome is Outcome.DONE)


def metric(gateway: GatewayChild, line: str) -> float:
    page: str = get(url_of(gateway), "/metrics")[2]
    return float(next(one for one in page.splitlines() if one.startswith(f"{line} ")).split()[-1])


def test_jobs_run_at_all_gateways_and_survive_a_kill_and_the_loss_of_redis_data(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with an_engine() as engine, gateways(tmp_path, redis_server, postgres_url, engine, 2) as (first, second):
        ids = create_jobs(first, 120, tokens=40)
        until(lambda: metric(second, 'inferry_work_deliveries_total{result="taken"}') > 0)
        second.stop(signal.SIGKILL)
        ids += create_jobs(first, 60, tokens=40)
        with redis_server.client() as client:
            client.flushall()
        await_completed(first, ids)
        until(lambda: metric(first, "inferry_work_queue_depth") == 0)
        first.stop(signal.SIGTERM)
    found = charged(postgres_url)
    assert set(found) == set(ids)
    assert set(found.values()) == {1}


def test_a_pull_worker_that_is_killed_loses_no_work(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(an_engine())
        found = stack.enter_context(gateways(tmp_path, redis_server, postgres_url, engine, 2))
        urls = [url_of(one) for one in found]
        ids = create_jobs(found[0], 40, "far", tokens=400)
        time.sleep(1.5)
        assert {status_of(found[1], id) for id in ids} == {"in_progress"}  # no gateway serves the model
        options = ("--upstream", engine, "--model", "far")
        first = PullWorkerChild(tmp_path / "worker-1", redis_server.url, urls, "--name", "one", *options)
        stack.callback(first.kill)
        until(lambda: any(status_of(found[0], id) == "completed" for id in ids), problem=first.log.read_text)
        first.kill()
        second = PullWorkerChild(tmp_path / "worker-2", redis_server.url, urls, "--name", "two", *options)
        stack.callback(second.kill)
        until(second.is_ready)
        until(lambda: metric(found[1], "inferry_pull_workers") >= 1)
        found[0].stop(signal.SIGKILL)  # the worker goes on with the other gateway
        await_completed(found[1], ids)
        second.stop(signal.SIGTERM)
        assert second.popen.returncode == 0, second.log.read_text()
        found[1].stop(signal.SIGTERM)
    rows = charged(postgres_url)
    assert set(rows) == set(ids)
    assert set(rows.values()) == {1}
    with open_queries(postgres_url) as queries:
        assert {row.worker for row in queries.jobs(limit=1000)} == {"one", "two"}


def test_a_batch_runs_from_the_queue_and_a_cancelled_one_ends(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with an_engine() as engine, gateways(tmp_path, redis_server, postgres_url, engine, 2) as (first, second):
        items = [
            {"custom_id": f"c{number}", "params": {"model": "m", "max_tokens": 3, "messages": MESSAGES}}
            for number in range(30)
        ]
        status, _, batch = post(url_of(second), "/v1/messages/batches", {"requests": items})
        assert status == 200, batch
        until(lambda: _batch(first, batch["id"])["processing_status"] == "ended", problem=first.log.read_text)
        assert _batch(first, batch["id"])["request_counts"]["succeeded"] == 30
        far = [{**one, "params": {**one["params"], "model": "far"}} for one in items]  # type: ignore[dict-item]
        status, _, waiting = post(url_of(first), "/v1/messages/batches", {"requests": far})
        assert status == 200, waiting
        until(lambda: metric(second, "inferry_work_queue_depth") == 30)
        assert post(url_of(second), f"/v1/messages/batches/{waiting['id']}/cancel", {})[0] == 200
        until(lambda: _batch(second, waiting["id"])["processing_status"] == "ended", problem=first.log.read_text)
        assert _batch(second, waiting["id"])["request_counts"]["canceled"] == 30


def test_work_is_handed_out_for_the_worker_key_alone(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    config = {
        "tenants": {"default": {}, "limited": {"day_token_ceiling": 1000}},
        "server": {"admin_key": "the key of operators"},  # without one the gateway's own machine needs no key
    }
    with ExitStack() as stack:
        engine = stack.enter_context(an_engine())
        (one,) = stack.enter_context(gateways(tmp_path, redis_server, postgres_url, engine, 1, config))
        (id, near) = (*create_jobs(one, 1, "far"), *create_jobs(one, 1, "m"))
        body = {"model": "far", "messages": MESSAGES}
        status, _, limited = post(
            url_of(one), "/v1/jobs", {"endpoint": CHAT, "body": body}, {"x-inferry-tenant": "limited"}
        )
        assert status == 202, limited
        ask = {"do": "load", "models": ["far"], "ids": [id, near, limited["id"]]}
        assert post(url_of(one), "/admin/work", ask)[0] == 403
        wrong = {"authorization": "Bearer another key of the same sort"}
        assert post(url_of(one), "/admin/work", ask, wrong)[0] == 403
        operator = {"authorization": "Bearer the key of operators"}
        assert post(url_of(one), "/admin/work", ask, operator)[0] == 403, "prompts of tenants are not for operators"
        right = {"authorization": f"Bearer {KEY}"}
        assert post(url_of(one), "/admin/workers/engine/drain", {}, right)[0] == 403
        status, _, found = post(url_of(one), "/admin/work", ask, right)
        assert (status, [work["id"] for work in found["work"]]) == (200, [id])
        assert post(url_of(one), "/admin/work", {**ask, "models": ["far", "m"]}, right)[0] == 403
        answer = {"status": 200, "body": "e30="}
        report = {"do": "finish", "id": id, "answer": answer, "entries": [_entry(f"{id}-0"), _entry("job_other-0")]}
        assert post(url_of(one), "/admin/work", report, right)[0] == 200
        assert status_of(one, id) == "completed"
        refused = _job_of(one, "limited", limited["id"])
        assert (refused["status"], refused["response"]["status_code"]) == ("failed", 403)
        wrong_key = PullWorkerChild(
            tmp_path / "worker", redis_server.url, [url_of(one)], "--upstream", engine, "--model", "far", key="x" * 20
        )
        assert wrong_key.popen.wait(timeout=120) == 2
        one.stop(signal.SIGTERM)
    with open_queries(postgres_url) as queries:
        rows = {row.job_id: row for row in queries.jobs(limit=100)}
    assert rows[f"{id}-0"].tenant == "default"  # whatever the pull-worker says
    assert rows[f"{id}-0"].gpu_seconds == 1.5
    assert "job_other-0" not in rows


def _entry(job_id: str) -> dict[str, Any]:
    told = {"tenant": "another", "run_id": "r", "step_id": "s", "model": "far", "lane": "P0", "outcome": "done"}
    return {"job_id": job_id, "attempt": 1, **told, "ended_at": time.time(), "gpu_seconds": 1.5}


def _job_of(gateway: GatewayChild, tenant: str, id: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120)
    try:
        connection.request("GET", f"/v1/jobs/{id}", headers={"x-inferry-tenant": tenant})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def _batch(gateway: GatewayChild, id: str) -> Any:
    return get(url_of(gateway), f"/v1/messages/batches/{id}")[2]
