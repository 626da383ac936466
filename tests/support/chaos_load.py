"""Mixed load on a cluster under faults, and what must hold of it: live calls, async jobs, a batch, budgets."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import redis

from inferry.domain.ledger import Outcome
from inferry.ledger.stores.opening import open_queries
from support.chaos_processes import RUN_CEILING, TENANT, Cluster, Member
from support.several_processes import expected_text
from support.waiting import until

LIVE_CALLERS, JOBS, ITEMS = 6, 40, 20
CLIENT_TIMEOUT_S = 60.0
CHAT = "/v1/chat/completions"
EXHAUSTED = "run_budget_exhausted"
HONEST = {"complete", "broken off", "refused connection", EXHAUSTED, "worker_lost", "worker_timeout", "no_worker"}
HONEST |= {"ledger_unavailable", "queue_full", "draining"}
"""Ends of a live call: a whole answer, a broken connection, the ceiling, or an error after which a client tries again.
A connection may break off only where its gateway was killed."""
UNCHARGED = (Outcome.FAILED, Outcome.PREEMPTED)
UNCHARGED_CODES = ("worker_lost", "worker_timeout")
"""Attempts that an engine lost are not charged."""


class Load:
    """`outcomes` counts live calls by how they ended, `complete_at` has when complete ones did; `problems` are broken
    promises.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._seed = cluster, seed
        self._lock = threading.Lock()
        self._stop, self._stop_sampling = threading.Event(), threading.Event()
        self._root = 0
        self.outcomes: Counter[str] = Counter()
        self.complete_at: list[float] = []
        self.delivered: Counter[str] = Counter()
        self.problems: list[str] = []
        self.jobs: dict[int, str] = {}
        self.most_held = 0
        self._live = [threading.Thread(target=self._call_again, args=(number,)) for number in range(LIVE_CALLERS)]
        self._jobs = threading.Thread(target=self._create_jobs)
        self._sampling = threading.Thread(target=self._sample_budgets)

    def start(self) -> None:
        self.batch = self._create_batch()
        for thread in (*self._live, self._jobs, self._sampling):
            thread.start()

    def stop(self) -> None:
        """End the live calls and the creation of jobs."""
        self._stop.set()
        for thread in (*self._live, self._jobs):
            thread.join(2 * CLIENT_TIMEOUT_S)
            assert not thread.is_alive(), "a call or the creation of a job has not ended"

    def stop_sampling(self) -> None:
        self._stop_sampling.set()
        self._sampling.join(CLIENT_TIMEOUT_S)

    # -- live calls --------------------------------------------------------------------------------------------------

    def _call_again(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while not self._stop.is_set():
            code = self.call(rng.choice(self._cluster.gateways), rng, f"agent-{number}")
            if code not in ("complete", EXHAUSTED):
                self._stop.wait(0.05)

    def call(self, gateway: Member, rng: random.Random, agent: str) -> str:
        """One call; how it ended."""
        root, kills = f"s{self._seed}-root-{self._root}", gateway.kills
        is_streamed, prompt = rng.random() < 0.5, [rng.randint(5, 300) for _ in range(rng.randint(5, 20))]
        body = {"model": "m", "prompt": prompt, "max_tokens": rng.randint(20, 120), "stream": is_streamed}
        headers = {"x-inferry-tenant": TENANT, "x-inferry-lane": rng.choice(["P0", "P1"])}
        headers |= {"x-inferry-run-id": f"{root}.{agent}", "x-inferry-parent-run-id": root}
        try:
            status, raw = _post(gateway, "/v1/completions", body, headers)
        except TimeoutError:
            self._problem(f"a call to {gateway.name} has no end")
            return "no end"
        if status is None and not raw:
            outcome, text = "refused connection", ""
        elif status is None or status == 200:
            outcome, text = _stream_outcome(raw) if is_streamed else _whole_outcome(raw, is_whole=status == 200)
        else:
            outcome, text = _code(raw), ""
        self._check(gateway, body, outcome, text, was_killed=gateway.kills != kills)
        with self._lock:
            self.outcomes[outcome] += 1
            if outcome == "complete":
                self.complete_at.append(time.monotonic())
            if text and outcome not in UNCHARGED_CODES:
                self.delivered[root] += len(prompt) + text.count(" w")
            if outcome == EXHAUSTED and root.endswith(f"-{self._root}"):
                self._root += 1
        return outcome

    def _check(self, gateway: Member, body: dict[str, Any], outcome: str, text: str, *, was_killed: bool) -> None:
        expected = expected_text(body)
        if not expected.startswith(text):
            self._problem(f"a call to {gateway.name} has other text: {text[-60:]!r} ({outcome})")
        if outcome == "complete" and text != expected:
            self._problem(f"a call to {gateway.name} ended as if complete with {len(text)} of {len(expected)} bytes")
        if outcome not in HONEST:
            self._problem(f"a call to {gateway.name} ended with {outcome!r}")
        if outcome == "broken off" and not was_killed:
            self._problem(f"a call to {gateway.name}, which was not killed, broke off without an error")

    def _problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)

    # -- durable work ------------------------------------------------------------------------------------------------

    def _create_batch(self) -> str:
        params = {"model": "m", "max_tokens": 8}
        requests = [
            {"custom_id": f"b{n}", "params": {**params, "messages": [{"role": "user", "content": f"b{n}"}]}}
            for n in range(ITEMS)
        ]
        status, raw = _post(self._cluster.gateways[0], "/v1/messages/batches", {"requests": requests}, {})
        assert status == 200, raw
        return str(json.loads(raw)["id"])

    def _create_jobs(self) -> None:
        rng = random.Random(f"{self._seed} jobs")
        for number in range(JOBS):
            self.create_job(rng.choice(self._cluster.gateways), number)
            self._stop.wait(rng.uniform(0.0, 0.3))

    def create_job(self, gateway: Member, number: int) -> str:
        """Create a job, of the gateways' model or of the pull-worker's. What has no answer is repeated elsewhere."""
        messages = [{"role": "user", "content": f"q{number}"}]
        body = {"model": "far" if number % 2 else "m", "messages": messages}
        others = iter(self._cluster.gateways * 1000)
        while True:
            with suppress(TimeoutError):
                key = {"idempotency-key": f"s{self._seed}-job-{number}"}
                status, raw = _post(gateway, "/v1/jobs", {"endpoint": CHAT, "body": body}, key)
                if status == 202:
                    self.jobs[number] = id = str(json.loads(raw)["id"])
                    return id
                if status is not None and status < 500 and status != 429:
                    self._problem(f"job {number} was refused: {raw[:200]!r}")
            gateway = next(others)
            time.sleep(0.05)

    def await_durable(self, gateway: Member) -> None:
        """Wait until all accepted work has ended, and check its results."""
        for number, id in sorted(self.jobs.items()):
            until(partial(self._has_ended, gateway, id), every_s=0.05, problem=partial(self._of_job, gateway, number))
            job = self.job(gateway, id)
            if job["status"] != "completed":
                self._problem(f"job {number} is {job['status']}: {job}")
            elif (text := job["response"]["body"]["choices"][0]["message"]["content"]) != f"echo q{number}":
                self._problem(f"job {number} has the answer {text!r}")
        path = f"/v1/messages/batches/{self.batch}"
        until(
            lambda: _get(gateway, path)["processing_status"] == "ended",
            every_s=0.05,
            problem=lambda: f"the batch has not ended: {_get(gateway, path)['request_counts']}",
        )
        if (counts := _get(gateway, path)["request_counts"])["succeeded"] != ITEMS:
            self._problem(f"the batch ended with {counts}")

    def _of_job(self, gateway: Member, number: int) -> str:
        job = self.job(gateway, self.jobs[number])
        return f"job {number} ({job['id']}) is {job['status']}"

    def _has_ended(self, gateway: Member, id: str) -> bool:
        return bool(self.job(gateway, id)["status"] != "in_progress")

    def job(self, gateway: Member, id: str) -> Any:
        return _get(gateway, f"/v1/jobs/{id}")

    def check_ledger(self, ledger: str) -> None:
        """Every result is charged once, and no run has more than its ceiling."""
        until(
            lambda: len(self._charged(ledger)) >= len(self.jobs) + ITEMS,
            every_s=0.2,
            problem=partial(self._uncharged, ledger),
        )
        for id, count in self._charged(ledger).items():
            if count != 1:
                self._problem(f"{id} is charged {count} times")
        spent: Counter[str] = Counter()
        for row in self._rows(ledger):
            if row.outcome not in UNCHARGED:
                spent[row.run_id.partition(".")[0]] += row.prompt_tokens + row.output_tokens
        for name, found in (("recorded", spent), ("delivered", self.delivered)):
            for root in self.delivered:
                if found[root] > RUN_CEILING:
                    self._problem(f"{found[root]} tokens {name} of {root}, more than {RUN_CEILING}")

    def _charged(self, ledger: str) -> Counter[str]:
        """Successful calls of the jobs and of the batch's items."""
        jobs = set(self.jobs.values())
        done = [row for row in self._rows(ledger) if row.outcome is Outcome.DONE]
        return Counter(
            work for row in done if (work := row.job_id.rpartition("-")[0]) in jobs or row.run_id == self.batch
        )

    def _uncharged(self, ledger: str) -> str:
        """The stored work without a charge, and the rows that it has."""
        charged = self._charged(ledger)
        missing = [f"job {number} ({id})" for number, id in sorted(self.jobs.items()) if id not in charged]
        ids = set(self.jobs.values())
        items = sum(work not in ids for work in charged)
        rows = [
            f"{row.job_id}: {row.outcome.value} at {row.worker}, shared with {row.shared_with}"
            for row in self._rows(ledger)
            if (row.job_id.rpartition("-")[0] in ids or row.run_id == self.batch) and row.outcome is not Outcome.DONE
        ]
        return f"not charged: {', '.join(missing)}; {items} of {ITEMS} items are; other rows: {', '.join(rows)}"

    def _rows(self, ledger: str) -> Any:
        with open_queries(ledger) as queries:
            return queries.jobs(limit=1_000_000)

    # -- budgets -----------------------------------------------------------------------------------------------------

    def _sample_budgets(self) -> None:
        """Look at what Redis says of the runs of this load, past the proxies, until Redis loses its state.

        Totals that are rebuilt after that may count settled usage twice; `check_ledger` has what was really spent.
        """
        client = redis.Redis.from_url(self._cluster.redis.url, socket_timeout=1.0)
        first: Any = None
        while not self._stop_sampling.wait(0.1):
            with suppress(redis.RedisError, OSError):
                found: Any = client.hget("inferry:state", "generation")
                first = found if first is None else first
                if found != first:
                    return
                for key in client.scan_iter(f"inferry:{int(found or 0)}:0:run*s{self._seed}-root-*tokens", count=1000):
                    account: Any = client.hgetall(key)
                    held = sum(int(amount) for name, amount in account.items() if name[:1] in (b"s", b"h"))
                    self.most_held = max(self.most_held, held)
                    if held > RUN_CEILING:
                        self._problem(f"{held} tokens spent and leased of {key!r}, more than {RUN_CEILING}")
        client.close()


def _post(gateway: Member, path: str, body: Any, headers: dict[str, str]) -> tuple[int | None, bytes]:
    """Status and body; None with what has arrived where the connection broke. Raises TimeoutError."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=CLIENT_TIMEOUT_S)
    raw, status = b"", None
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        response = connection.getresponse()
        status = response.status
        while piece := response.read1(65_536):
            raw += piece
        if response.length or (response.chunked and response.chunk_left is not None):
            return None, raw or b" "
        return status, raw
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException):
        return None, raw if status is None else raw or b" "
    finally:
        connection.close()


def _get(gateway: Member, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=CLIENT_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def _stream_outcome(raw: bytes) -> tuple[str, str]:
    """How a stream ended, and its text."""
    text, finish, stopped = "", None, None
    for part in raw.split(b"\n\n"):
        if part == b"data: [DONE]":
            return stopped or ("complete" if finish == "length" else "end without a reason"), text
        if not part.startswith(b"data: ") or not part.endswith(b"}"):
            continue
        event = json.loads(part[6:])
        if "error" in event:
            return str(event["error"]["code"]), text
        stopped = event.get("inferry", {}).get("code", stopped)
        for choice in event.get("choices", ()):
            text, finish = text + choice["text"], choice["finish_reason"] or finish
    return "broken off", text


def _whole_outcome(raw: bytes, *, is_whole: bool) -> tuple[str, str]:
    if not is_whole:
        return "broken off", ""
    answer = json.loads(raw)
    (choice,) = answer["choices"]
    stopped = answer.get("inferry", {}).get("code")
    return stopped or ("complete" if choice["finish_reason"] == "length" else "end without a reason"), choice["text"]


def _code(raw: bytes) -> str:
    return str(json.loads(raw)["error"]["code"])
