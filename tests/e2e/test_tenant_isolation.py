"""Two tenants at one gateway, one of which means harm: what it guesses, spoofs, measures and reads tells it nothing.

`acme` attacks, `globex` has something to lose. Every secret of globex has a word in it that is looked for in whatever
acme gets to see.
"""

import asyncio
import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.values import replace
from inferry.domain.workers import WorkerView
from inferry.ledger.stores.sqlite import open_sqlite_queries
from support.http_gateway import HttpGateway
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, Answer, TenantGateway, bearer
from support.upstream import Upstream

WORD = "zanzibar"
"""In every secret of globex: prompts, run and step ids, labels, models."""
THEIRS = {"model": "m", "messages": [{"role": "user", "content": f"the plans for {WORD}"}], "temperature": 0}
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RUN = f"run-{WORD}"
STEP = f"step-{WORD}"


class House(TenantGateway):
    """A gateway with the two of them, globex with a run, a sub-run and a kept answer."""

    worker: ScriptedWorker
    clients: ThreadPoolExecutor

    def __init__(self, directory: Path, **config: Any) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
            self.worker = ScriptedWorker(models=("m", f"tuned-{WORD}"))
            return [self.worker], {}

        super().__init__(directory, make, config)

    def settle(self) -> None:
        self.acme, self.acme_too = self.key("acme"), self.key("acme")
        self.globex, self.globex_too = self.key("globex", label=WORD), self.key("globex")
        kept = {"idempotency_key": f"key-{WORD}", "x_inferry_replay": "allow"}
        first = self.ask(self.globex, THEIRS, x_inferry_run_id=RUN, x_inferry_step_id=STEP, **kept)
        self.ask(self.globex, THEIRS, x_inferry_run_id=f"{RUN}-sub", x_inferry_parent_run_id=RUN)
        self.job_id = first.headers["x-request-id"]

    def ask(self, key: str, body: Any = None, **headers: str) -> Answer:
        return self.call("POST", CHAT, CALL if body is None else body, bearer(key, **headers))

    @property
    def executions(self) -> int:
        return sum(len(plan.jobs) for plan in self.worker.plans)

    def hold(self, *, back: bool) -> None:
        async def act() -> None:
            if back:
                self.worker.gate.clear()
            else:
                self.worker.gate.set()

        self.run(act())

    def ask_later(self, key: str, body: Any = None, **headers: str) -> "Future[Answer]":
        """Returns once the gateway has the call."""
        before = self.metric("inferry_jobs_in_flight")
        asked = self.clients.submit(self.ask, key, body, **headers)
        wait_until(lambda: self.metric("inferry_jobs_in_flight") > before)
        return asked

    def as_seen_by(self, key: str, method: str, path: str) -> Answer:
        return self.call(method, path, headers=bearer(key))


def wait_until(is_so: Any) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path) as gateway, ThreadPoolExecutor(8) as gateway.clients:
        gateway.settle()
        yield gateway
        if gateway.is_alive:
            gateway.hold(back=False)


def told(answer: Answer) -> tuple[int, bytes, dict[str, str]]:
    """All that an answer says, but for the number that every one of them has of its own."""
    return answer.status, answer.body, {n: v for n, v in answer.headers.items() if n != "x-request-id"}


# -- ids guessed -----------------------------------------------------------------------------------------------------


def test_anothers_run_is_as_if_it_had_never_been(env: House) -> None:
    never = "run-of-nobody"
    guesses = [RUN, f"{RUN}-sub", STEP, env.job_id, f"key-{WORD}", f"globex {RUN}", f"globex/{RUN}"]
    for method, path in (("GET", "/v1/runs/{}"), ("DELETE", "/v1/runs/{}"), ("POST", "/v1/runs/{}/finish")):
        for guess in guesses:
            theirs = env.as_seen_by(env.acme, method, path.format(guess.replace(" ", "%20").replace("/", "%2F")))
            if " " in guess:
                assert theirs.status == 400
                continue
            none = env.as_seen_by(env.acme, method, path.format(never))
            status, body, headers = told(none)
            body = body.replace(never.encode(), guess.encode())
            headers["content-length"] = str(len(body))
            assert told(theirs) == (status, body, headers)
            assert status == 404
    page = env.as_seen_by(env.globex, "GET", f"/v1/runs/{RUN}").json
    assert (page["status"], page["jobs"]["done"], page["sub_runs"]) == ("idle", 1, [f"{RUN}-sub"])
    assert env.ask(env.globex_too, x_inferry_run_id=RUN).status == 200, "and nothing of it was cancelled"


def test_a_run_of_the_same_name_is_another_run(env: House) -> None:
    for _ in range(2):
        assert env.ask(env.acme, x_inferry_run_id=RUN, x_inferry_step_id=STEP).status == 200
    mine, theirs = (env.as_seen_by(key, "GET", f"/v1/runs/{RUN}").json for key in (env.acme, env.globex))
    assert (mine["jobs"]["done"], theirs["jobs"]["done"]) == (2, 1)
    assert mine["sub_runs"] == []
    assert env.as_seen_by(env.acme, "DELETE", f"/v1/runs/{RUN}").status == 200
    assert env.ask(env.acme_too, x_inferry_run_id=RUN).code == "run_cancelled"
    assert env.ask(env.globex, x_inferry_run_id=RUN).status == 200
    assert env.as_seen_by(env.globex, "GET", f"/v1/runs/{RUN}").json["status"] == "idle"


def test_a_run_cannot_join_another_tenants_tree(env: House) -> None:
    env.hold(back=True)
    mine = env.ask_later(env.acme, x_inferry_run_id="child", x_inferry_parent_run_id=RUN)
    assert env.as_seen_by(env.globex, "GET", f"/v1/runs/{RUN}").json["tree"]["in_flight"] == 0
    assert env.as_seen_by(env.globex, "DELETE", f"/v1/runs/{RUN}").json["running"] == 0
    env.hold(back=False)
    assert mine.result(120).status == 200
    page = env.as_seen_by(env.acme, "GET", "/v1/runs/child").json
    assert (page["parent_run_id"], page["status"]) == (RUN, "idle"), "the parent it names is one of its own"


def test_a_cancelled_run_of_one_tenant_does_not_cancel_calls_of_another(env: House) -> None:
    env.hold(back=True)
    theirs = env.ask_later(env.globex, x_inferry_run_id=RUN)
    mine = env.ask_later(env.acme, x_inferry_run_id=RUN)
    assert env.as_seen_by(env.acme, "DELETE", f"/v1/runs/{RUN}").json["running"] == 1
    env.hold(back=False)
    assert mine.result(120).code == "run_cancelled"
    assert theirs.result(120).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"idempotency_key": f"key-{WORD}"},
        {"x_inferry_run_id": RUN, "idempotency_key": f"key-{WORD}"},
        {"x_inferry_run_id": RUN, "x_inferry_step_id": STEP},
        {"x_inferry_run_id": RUN, "x_inferry_step_id": STEP, "x_inferry_replay": "allow"},
    ],
)
def test_a_cached_response_is_not_given_to_another_tenant(env: House, headers: dict[str, str]) -> None:
    before = env.executions
    answer = env.ask(env.acme, THEIRS, **headers)
    assert answer.status == 200
    assert not {"x-inferry-replayed", "x-inferry-shared-with"} & set(answer.headers)
    assert env.executions == before + 1
    own = env.ask(env.globex_too, THEIRS, x_inferry_run_id=RUN, idempotency_key=f"key-{WORD}")
    assert own.headers["x-inferry-replayed"] == "true", "while its owner has it, with any of its keys"


def test_equal_calls_of_two_tenants_are_computed_twice(env: House) -> None:
    before = env.executions
    env.hold(back=True)
    asked = [env.ask_later(key, THEIRS) for key in (env.globex, env.globex_too, env.acme)]
    env.hold(back=False)
    first, shared, other = (one.result(120) for one in asked)
    assert {one.status for one in (first, shared, other)} == {200}
    assert "x-inferry-shared-with" in shared.headers
    assert "x-inferry-shared-with" not in other.headers
    assert env.executions == before + 2


# -- headers spoofed -------------------------------------------------------------------------------------------------


def owner_of_last(env: House, key: str) -> None:
    """Whoever else the call said to be from: the run `spoofed` is the key's tenant's, and no other's."""
    for one in (env.acme, env.globex):
        found = env.as_seen_by(one, "GET", "/v1/runs/spoofed").status
        assert found == (200 if one == key else 404)


@pytest.mark.parametrize(
    "headers",
    [
        {"x_forwarded_for": "10.0.0.1"},
        {"forwarded": "for=10.0.0.1;host=globex"},
        {"x_forwarded_user": "globex"},
        {"x_tenant_id": "globex"},
        {"x_inferry_key_id": "globex"},
        {"openai_organization": "globex", "openai_project": "globex"},
        {"x_inferry_tenant": "acme"},
        {"cookie": "tenant=globex"},
    ],
)
def test_only_the_key_determines_the_tenant(env: House, headers: dict[str, str]) -> None:
    assert env.ask(env.acme, x_inferry_run_id="spoofed", **headers).status == 200
    owner_of_last(env, env.acme)


def test_of_two_keys_the_bearer_counts_and_never_a_mixture(env: House) -> None:
    assert env.ask(env.acme, x_inferry_run_id="spoofed", x_api_key=env.globex).status == 200
    owner_of_last(env, env.acme)
    wrong = env.acme[:-1] + ("a" if env.acme[-1] != "a" else "b")
    assert env.ask(wrong, x_api_key=env.globex).status == 401
    secret_of_another = env.globex.rpartition("_")[2]
    assert env.ask(f"{env.acme.rpartition('_')[0]}_{secret_of_another}").status == 401


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "x-inferry-tenant", "x-inferry-run-id"])
def test_a_duplicate_key_is_an_error(env: House, name: str) -> None:
    values = {
        "authorization": [f"Bearer {env.acme}", f"Bearer {env.globex}"],
        "x-api-key": [env.acme, env.globex],
        "x-inferry-tenant": ["acme", "globex"],
        "x-inferry-run-id": ["spoofed", RUN],
    }[name]
    for pair in (values, values[::-1]):
        connection = http.client.HTTPConnection("127.0.0.1", env.port, timeout=120)
        body = json.dumps(CALL).encode()
        connection.putrequest("POST", CHAT)
        if name not in ("authorization", "x-api-key"):
            connection.putheader("authorization", f"Bearer {env.acme}")
        for value in pair:
            connection.putheader(name, value)
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        assert response.status == (400 if name == "x-inferry-run-id" else 401)
        assert WORD not in response.read().decode().replace(RUN, "")
        connection.close()
    assert env.as_seen_by(env.globex, "GET", f"/v1/runs/{RUN}").json["jobs"]["done"] == 1


@pytest.mark.parametrize(
    ("headers", "run"),
    [
        ({"x_claude_code_session_id": WORD}, f"claude-code:{WORD}"),
        ({"x_claude_code_session_id": WORD, "x_claude_code_agent_id": "a"}, f"claude-code:{WORD}%2Fa"),
        ({"session_id": WORD}, f"codex:{WORD}"),
        ({"thread_id": "t", "x_codex_parent_thread_id": WORD}, "codex:t"),
        ({"x_session_id": WORD, "x_parent_session_id": RUN}, f"session:{WORD}"),
    ],
)
def test_a_harness_names_sessions_of_its_own_tenant_alone(env: House, headers: dict[str, str], run: str) -> None:
    sent = {("session_id" if name == "session_id" else name.replace("_", "-")): headers[name] for name in headers}
    for key in (env.globex, env.acme):
        assert env.call("POST", CHAT, CALL, {"authorization": f"Bearer {key}", **sent}).status == 200
    for key in (env.acme, env.globex):
        assert env.as_seen_by(key, "GET", f"/v1/runs/{run}").json["tree"]["jobs"] == 1
    assert env.as_seen_by(env.acme, "DELETE", f"/v1/runs/{run}").status == 200
    assert env.call("POST", CHAT, CALL, {"authorization": f"Bearer {env.globex}", **sent}).status == 200


def test_the_admin_key_and_tenants_keys_open_different_doors(env: House) -> None:
    for path in ("/admin/keys", "/admin/tenants", "/admin/workers", "/admin/tenants/globex", "/%61dmin/keys"):
        answer = env.as_seen_by(env.acme, "GET", path)
        assert (answer.status, answer.code) == (403, "admin_only")
        assert "globex" not in answer.body.decode()
    assert env.as_admin("GET", "/v1/models").status == 401
    assert env.as_admin("POST", CHAT, CALL).status == 401


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_runs_are_listed_to_their_own_tenant(env: House) -> None:
    for number in range(3):
        env.ask(env.acme, x_inferry_run_id=f"mine-{number}")
        env.ask(env.globex, x_inferry_run_id=f"{RUN}-{number}")
    theirs = env.as_seen_by(env.globex, "GET", "/v1/runs?limit=2").json
    assert {one["id"] for one in env.as_seen_by(env.acme, "GET", "/v1/runs").json["data"]} == {
        f"mine-{number}" for number in range(3)
    }
    for query in (f"parent={RUN}", f"cursor={theirs['next_cursor']}", "since=0", "status=idle&limit=200"):
        answer = env.as_seen_by(env.acme, "GET", f"/v1/runs?{query}")
        assert WORD not in answer.body.decode()
    assert WORD in env.as_seen_by(env.globex, "GET", f"/v1/runs?parent={RUN}").body.decode()


def test_rows_of_the_ledger_have_the_tenant_and_the_key_that_called(env: House) -> None:
    env.ask(env.acme, x_inferry_run_id=RUN, x_forwarded_user="globex")
    env.ask(env.acme_too, x_inferry_run_id=RUN, x_api_key=env.globex)
    env.stop()
    env.join()
    with open_sqlite_queries(env.config.ledger) as ledger:
        rows = ledger.jobs(limit=100)
        mine = {row.key_id for row in rows if row.tenant == "acme"}
        assert mine == {key.split("_")[1] for key in (env.acme, env.acme_too)}
        assert {row.key_id for row in rows if row.tenant == "globex"} == {env.globex.split("_")[1]}
        assert [one.jobs for one in ledger.runs(limit=9, tenant="acme", run=RUN)] == [2]
        assert {row.run_id for row in ledger.jobs(limit=9, tenant="acme", run=f"{RUN}-sub")} == set()


def test_metrics_name_no_tenant(env: House) -> None:
    env.ask(env.acme, {**CALL, "temperature": 9})
    env.ask(env.globex, THEIRS, x_inferry_template_id=f"template-{WORD}")
    page = env.call("GET", "/metrics").body.decode()
    assert "inferry_" in page
    shown = page.replace(f"tuned-{WORD}", "")  # models are the configuration's words
    for hidden in (WORD, "acme", "globex", *(key.split("_")[1] for key in (env.acme, env.globex)), env.job_id):
        assert hidden not in shown


def test_models_that_are_not_for_a_key_are_not_shown_to_it(env: House) -> None:
    key = env.key("acme", limits={"models": ["m"]})
    assert [one["id"] for one in env.as_seen_by(key, "GET", "/v1/models").json["data"]] == ["m"]
    hidden = env.as_seen_by(key, "GET", f"/v1/models/tuned-{WORD}")
    never = env.as_seen_by(key, "GET", "/v1/models/never")
    assert (hidden.status, never.status) == (404, 404)
    assert hidden.body.replace(f"tuned-{WORD}".encode(), b"never") == never.body
    assert env.ask(key, {**CALL, "model": f"tuned-{WORD}"}).code == "model_not_allowed"
    both = {one["id"] for one in env.as_seen_by(env.acme, "GET", "/v1/models").json["data"]}
    assert both == {"m", f"tuned-{WORD}"}


class PooledWorker(ScriptedWorker):
    """One of a tenant's own."""

    def view(self) -> WorkerView:
        return replace(super().view(), isolation="globex")


def test_an_own_pool_needs_no_warning(tmp_path: Path) -> None:
    workers: list[ScriptedWorker] = []

    def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
        workers.extend([ScriptedWorker("shared"), PooledWorker("own", models=("m", f"tuned-{WORD}"))])
        return workers, {}

    with TenantGateway(tmp_path, make) as gateway:
        assert gateway.as_admin("PUT", "/admin/tenants/globex", {"isolation": "pool"}).status == 200
        acme, globex = gateway.key("acme"), gateway.key("globex")
        seen = {
            key: {one["id"] for one in gateway.call("GET", "/v1/models", headers=bearer(key)).json["data"]}
            for key in (acme, globex)
        }
        assert seen == {acme: {"m"}, globex: {"m", f"tuned-{WORD}"}}
        tuned = {**CALL, "model": f"tuned-{WORD}"}
        theirs, never = (
            gateway.call("POST", CHAT, {**CALL, "model": model}, bearer(acme)) for model in (tuned["model"], "never")
        )
        assert told(theirs)[:2] == (404, never.body.replace(b"never", str(tuned["model"]).encode()))
        assert gateway.call("POST", CHAT, tuned, bearer(globex)).headers["x-inferry-worker"] == "own"
        assert gateway.call("POST", CHAT, CALL, bearer(globex)).headers["x-inferry-worker"] == "own"
        assert gateway.call("POST", CHAT, CALL, bearer(acme)).headers["x-inferry-worker"] == "shared"
        tenants = [{job.tenant for plan in worker.plans for job in plan.jobs} for worker in workers]
        assert tenants == [{"acme"}, {"globex"}]


# -- limits and figures ----------------------------------------------------------------------------------------------


def test_what_one_tenant_uses_up_is_not_missing_to_another(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 20, "tokens_per_minute": 100_000, "max_concurrent": 3, "run_token_ceiling": 10_000}
    with House(tmp_path, tenants={"acme": limits, "globex": limits}) as env:
        env.settle()
        before = env.ask(env.globex, x_inferry_run_id="shared-name")
        refused = [env.ask(env.acme, x_inferry_run_id="shared-name") for _ in range(25)][-1]
        assert refused.code == "rate_limited"
        assert int(refused.headers["x-ratelimit-remaining-requests"]) == 0
        after = env.ask(env.globex, x_inferry_run_id="shared-name")
        assert after.status == 200
        left = [int(one.headers["x-ratelimit-remaining-requests"]) for one in (before, after)]
        assert left[1] >= left[0] - 1
        pages = [env.as_seen_by(key, "GET", "/v1/runs/shared-name").json for key in (env.acme, env.globex)]
        assert pages[0]["budget"]["spent_tokens"] > pages[1]["budget"]["spent_tokens"] > 0
        assert (pages[1]["jobs"]["refused"], pages[0]["jobs"]["refused"] > 0) == (0, True)


def test_sizes_learned_of_one_tenants_template_are_not_used_for_another(env: House) -> None:
    gateway = env.service.gateway
    for _ in range(20):
        env.ask(env.globex, {**THEIRS, "temperature": 1}, x_inferry_template_id="support")
    gateway.models.estimator._ratios._ratios[("m", None)] = 0.25
    theirs, mine = (gateway.models.estimator.prompt(tenant, "m", "support", 1000) for tenant in ("globex", "acme"))
    assert theirs.expected != mine.expected == 250


# -- error texts and logs --------------------------------------------------------------------------------------------


WRONG: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", CHAT, {**THEIRS, "temperature": WORD}, {}),
    ("POST", CHAT, {**THEIRS, "messages": [{"role": WORD, "content": WORD}]}, {}),
    ("POST", CHAT, {**THEIRS, "max_tokens": 10**8}, {}),
    ("POST", CHAT, {**THEIRS, "service_tier": WORD}, {}),
    ("POST", CHAT, {**THEIRS, "stop": [WORD * 500]}, {}),
    ("POST", CHAT, json.dumps(THEIRS).encode()[:-5], {}),
    ("POST", "/v1/completions", {"model": "m", "prompt": {"a": WORD}}, {}),
    ("POST", "/v1/completions", {"model": "m", "prompt": [WORD, WORD]}, {}),
    ("POST", CHAT, THEIRS, {"x-inferry-lane": WORD}),
    ("POST", CHAT, THEIRS, {"x-inferry-tenant": WORD}),
    ("POST", CHAT, THEIRS, {"x-inferry-deadline-ms": WORD}),
    ("POST", CHAT, THEIRS, {"idempotency-key": f"{WORD} {WORD}"}),
    ("POST", CHAT, THEIRS, {"x-inferry-lane": "P0"}),
    ("GET", "/v1/runs?status=" + WORD, None, {}),
    ("GET", "/v1/runs?cursor=" + WORD, None, {}),
    ("POST", CHAT, THEIRS, {}),
    ("POST", CHAT, {**THEIRS, "stream": True}, {}),
]


async def _refuses(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": f"no: {request.headers['authorization']}"}}, status=500)


async def _says_why(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": f"key {request.headers['authorization']} is bad"}}, status=400)


async def _breaks_off(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("script", [_refuses, _says_why, _breaks_off])
def test_errors_and_logs_tell_no_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture, script: Any) -> None:
    caplog.set_level(logging.DEBUG)
    with HttpGateway(tmp_path, script, {"tenants": {"acme": {"max_lane": "P1"}}}) as gateway:
        key, other = gateway.key("acme"), gateway.key("globex")
        seen = []
        for method, path, body, headers in WRONG:
            answer = gateway.call(method, path, body, {**bearer(key), **headers})
            assert answer.status >= 400, (path, body)
            seen.append(answer)
        hidden = [WORD, "globex", "sk-upstream-key", gateway.upstream.url, str(gateway.upstream.port)]
        hidden += [part for one in (key, other) for part in (one, one.rpartition("_")[2])]
    for answer in seen:
        for secret in hidden:
            assert secret not in answer.body.decode(), answer
            assert secret not in str(answer.headers)
    # The operator's log may name the worker's address; it never has what users wrote, nor a secret.
    for secret in (WORD, "sk-upstream-key", *hidden[5:]):
        assert secret not in caplog.text


def test_a_disabled_tenant_and_a_revoked_key_look_like_a_key_that_never_was(env: House) -> None:
    made_up = "ifk_0123456789_" + "a" * 43
    env.as_admin("DELETE", f"/admin/keys/{env.globex_too.split('_')[1]}")
    env.as_admin("PUT", "/admin/tenants/gone", {"disabled": True})
    disabled = env.key("gone")
    wrong_secret = env.globex[:-1] + ("a" if env.globex[-1] != "a" else "b")
    answers = [told(env.ask(key)) for key in (made_up, env.globex_too, disabled, wrong_secret)]
    assert all(one == answers[0] for one in answers)
    assert answers[0][0] == 401


# -- caches ----------------------------------------------------------------------------------------------------------


def test_prompts_of_two_tenants_are_salted_apart_at_the_engine(tmp_path: Path) -> None:
    with HttpGateway(tmp_path) as gateway:
        acme, acme_too, globex = gateway.key("acme"), gateway.key("acme"), gateway.key("globex")
        body = {**THEIRS, "temperature": 1}
        for key in (globex, acme, acme_too):
            assert gateway.call("POST", CHAT, body, bearer(key)).status == 200
        salts = [sent["cache_salt"] for sent in gateway.upstream.bodies]
        plain = json.dumps(body)[:-1]
        disguised = plain + f', "cache\\u005fsalt": "{salts[0]}"' + "}"
        repeated = plain + f', "cache_salt": "{salts[0]}", "cache_salt": null' + "}"
        for stolen in (json.dumps({**body, "cache_salt": salts[0]}), disguised, repeated):
            assert gateway.call("POST", CHAT, stolen.encode(), bearer(acme)).status == 400
        assert gateway.call("POST", CHAT, {**body, "cache_salt": None}, bearer(acme)).status == 200
        salts = [sent["cache_salt"] for sent in gateway.upstream.bodies]
        assert salts[1:] == [salts[1]] * 3, "a tenant has its own salt"
        assert salts[0] != salts[1]
        assert not {"acme", "globex"} & set(salts)
        for headers in gateway.upstream.headers:
            assert headers["authorization"] == "Bearer sk-upstream-key"
            told_upstream = json.dumps(headers)
            assert not any(key in told_upstream for key in (acme, acme_too, globex))
            assert "globex" not in told_upstream


def test_the_embedded_engine_finds_nothing_of_anothers_prompt(tmp_path: Path, tiny_model: Path) -> None:
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    with TenantGateway(tmp_path, None, {"workers": [worker]}) as gateway:
        acme, globex = gateway.key("acme"), gateway.key("globex")
        body = {"model": "tiny", "prompt": f"{WORD} " * 60, "max_tokens": 2, "temperature": 0}
        answers = [gateway.call("POST", "/v1/completions", body, bearer(key)) for key in (globex, globex, acme)]
        usages = [one.json["usage"] for one in answers]
        assert [one["prompt_tokens_details"]["cached_tokens"] for one in usages if one is not usages[1]] == [0, 0]
        assert {one["completion_tokens"] for one in usages} == {2}
        assert not any("x-inferry-shared-with" in one.headers for one in answers)


def test_a_stream_that_is_read_slowly_is_read_by_its_own_client_alone(env: House) -> None:
    """Bytes of one answer never turn up in another's connection, also where both are reset and made again."""
    bodies = {
        env.acme: {**CALL, "stream": True},
        env.globex: {**THEIRS, "stream": True, "temperature": 1},
    }

    def leave(key: str) -> None:
        body = json.dumps(bodies[key]).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", env.port), timeout=120) as sock:
            sock.sendall(head.encode() + body)

    for _ in range(10):
        leave(env.globex)
        answer = env.ask(env.acme, bodies[env.acme], x_request_id="mine")
        assert answer.headers["x-request-id"] == "mine"
        ids = {json.loads(one[6:])["id"] for one in answer.body.decode().split("\n\n") if one.startswith("data: {")}
        assert len(ids) == 1

    async def nobody_left() -> None:
        async with asyncio.timeout(120):
            while env.service.gateway.in_flight:
                await asyncio.sleep(0.01)

    env.run(nobody_left())
