"""Async jobs with callbacks of a real gateway process that is killed while they are accepted, run and reported.

`python -m support.killed_jobs FIRST COUNT` plays seeds and keeps what they show; `--add` keeps earlier runs too.
"""

import base64
import http.client
import json
import random
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from inferry.durable.callback_signature import sign
from support.callback_receiver import CallbackReceiver, Received
from support.killed_batches import CHAT, LIMIT_S, Engine, Gateway
from support.seed_results import KILLS, play_killed
from support.serving import get, post

JOBS = 80
CALLBACKS = {"allow_http": True, "allowed_networks": ["127.0.0.0/8"], "initial_backoff_s": 0.02, "max_backoff_s": 0.1}
FAILURE_SHARE = 0.3
"""Share of callbacks that the receiver does not confirm."""


class Receiver(CallbackReceiver):
    """Fails now and then. `confirmed` counts what it answered with a 2xx, by job."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.confirmed: Counter[str] = Counter()

        def answer(one: Received) -> int:
            if rng.random() < FAILURE_SHARE:
                return rng.choice([302, 404, 429, 500, 503])
            self.confirmed[one.headers["webhook-id"]] += 1
            return 200

        super().__init__(answer)


class Client:
    """Creates jobs. A request without an answer is repeated under the same idempotency key."""

    def __init__(self, callback_url: str) -> None:
        self.ids: list[str] = []
        self._callback_url = callback_url

    def create(self, gateway: Gateway, count: int) -> None:
        """Create jobs until there are `count`, or until the gateway is killed."""
        try:
            while len(self.ids) < count:
                number = len(self.ids)
                body = {"model": "m", "messages": [{"role": "user", "content": f"q{number}"}]}
                job = {"endpoint": CHAT, "body": body, "callback_url": f"{self._callback_url}/{number}"}
                status, _, answer = post(gateway.url, "/v1/jobs", job, {"idempotency-key": f"job-{number}"})
                assert status == 202, answer
                self.ids.append(answer["id"])
        except (OSError, http.client.HTTPException):
            pass


def kill_while_jobs_run(directory: Path, seed: int, kills: int = KILLS) -> dict[str, float]:
    """Run jobs through several gateways that are killed; raises AssertionError where an invariant is broken."""
    rng, restarts_s = random.Random(seed), [0.0]
    with Engine() as engine, Receiver(seed) as receiver:
        gateway = Gateway(directory, engine.upstream.url, callbacks=CALLBACKS)
        try:
            status, _, secret = post(gateway.url, "/admin/tenants/default/callback-secrets", {})
            assert status == 201, secret
            client = Client(receiver.url)
            for number in range(kills):
                timer = threading.Timer(rng.uniform(0.0, 0.4), gateway.popen.send_signal, [signal.SIGKILL])
                timer.start()
                client.create(gateway, JOBS * (number + 1) // kills)
                gateway.popen.wait(timeout=60)
                timer.join()
                gateway = Gateway(directory, engine.upstream.url, callbacks=CALLBACKS)
                restarts_s.append(gateway.start_s)
            client.create(gateway, JOBS)
            _check_jobs(gateway, client.ids)
            _check_callbacks(client.ids, receiver, base64.b64decode(secret["secret"].removeprefix("whsec_")))
            gateway.stop(signal.SIGTERM)
            _check_charges(directory / "inferry.db", client.ids)
            calls, callbacks = len(engine.upstream.bodies), len(receiver.received)
            return {"jobs": JOBS, "calls": calls, "callbacks": callbacks, "longest_restart_s": max(restarts_s)}
        finally:
            if gateway.popen.poll() is None:
                gateway.stop(signal.SIGKILL)


def _check_jobs(gateway: Gateway, ids: list[str]) -> None:
    """Every job has its one answer and a callback that is marked as delivered."""
    assert len(set(ids)) == JOBS
    end = time.monotonic() + LIMIT_S
    for number, id in enumerate(ids):
        while not _is_over(job := get(gateway.url, f"/v1/jobs/{id}")[2]):
            assert time.monotonic() < end, (job, gateway.log.read_text())
            time.sleep(0.02)
        assert job["status"] == "completed", job
        assert job["response"]["body"]["choices"][0]["message"]["content"] == f"echo q{number}"
        assert job["callback"]["status"] == "delivered", job
        log = get(gateway.url, f"/v1/jobs/{id}/deliveries")[2]["data"]
        assert [one["status"] == 200 for one in log] == [False] * (len(log) - 1) + [True], log
        assert len(log) == job["callback"]["attempts"]
    assert len(get(gateway.url, "/v1/jobs?limit=100")[2]["data"]) == JOBS, "no job was accepted twice"


def _is_over(job: Any) -> bool:
    return job["status"] != "in_progress" and job["callback"]["status"] not in ("waiting", "pending")


def _check_callbacks(ids: list[str], receiver: Receiver, key: bytes) -> None:
    """Every job was confirmed at least once, and every attempt had the same signed body."""
    for number, id in enumerate(ids):
        assert receiver.confirmed[id] >= 1
        arrived = receiver.of(id)
        assert {one.path for one in arrived} == {f"/{number}"}
        assert len({one.body for one in arrived}) == 1
        for one in arrived:
            expected = sign(key, id, int(one.headers["webhook-timestamp"]), one.body)
            assert one.headers["webhook-signature"] == expected
        event = json.loads(arrived[0].body)
        assert (event["type"], event["data"]["id"]) == ("job.completed", id)
    assert {one.headers["webhook-id"] for one in receiver.received} == set(ids)


def _check_charges(database: Path, ids: list[str]) -> None:
    query = "SELECT run_id FROM attempts WHERE cost_nanos > 0"
    with closing(sqlite3.connect(database)) as connection:
        charged = Counter(run for (run,) in connection.execute(query))
    assert charged == Counter(ids), "every result is charged once"


if __name__ == "__main__":
    sys.exit(play_killed("killed_jobs", kill_while_jobs_run))
