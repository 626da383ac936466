"""What a tenant can see of others: listings, ledger rows, metrics, models, error texts and logs."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from e2e.isolation_gateway import CALL, RUN, THEIRS, WORD, House, told
from inferry.domain.values import replace
from inferry.domain.workers import WorkerView
from inferry.ledger.stores.opening import open_queries
from support.http_gateway import HttpGateway
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, TenantGateway, bearer
from support.upstream import Upstream

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
    with open_queries(env.config.ledger) as ledger:
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


def test_an_unknown_model_is_answered_with_models_that_the_key_may_use(env: House) -> None:
    def listed(key: str) -> tuple[int, str]:
        answer = env.ask(key, {**CALL, "model": "never"})
        return answer.status, answer.json["error"]["message"]

    some, none = (env.key("acme", limits={"models": [model]}) for model in ("m", "x"))
    assert listed(env.acme) == (404, f"unknown model `never`; models of this gateway: `m`, `tuned-{WORD}`")
    assert listed(some) == (404, "unknown model `never`; models of this gateway: `m`")
    assert listed(none) == (404, "unknown model `never`")


class PooledWorker(ScriptedWorker):
    """One of a tenant's own."""

    def view(self) -> WorkerView:
        return replace(super().view(), isolation="globex")


def test_a_tenant_pool_gives_no_isolation_warning(tmp_path: Path) -> None:
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


def test_limits_used_up_by_one_tenant_do_not_affect_another(tmp_path: Path) -> None:
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


def test_template_statistics_are_separate_per_tenant(env: House) -> None:
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
def test_errors_and_logs_contain_no_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture, script: Any) -> None:
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


def test_disabled_tenants_and_revoked_keys_get_the_error_of_an_unknown_key(env: House) -> None:
    made_up = "ifk_0123456789_" + "a" * 43
    env.as_admin("DELETE", f"/admin/keys/{env.globex_too.split('_')[1]}")
    env.as_admin("PUT", "/admin/tenants/gone", {"disabled": True})
    disabled = env.key("gone")
    wrong_secret = env.globex[:-1] + ("a" if env.globex[-1] != "a" else "b")
    answers = [told(env.ask(key)) for key in (made_up, env.globex_too, disabled, wrong_secret)]
    assert all(one == answers[0] for one in answers)
    assert answers[0][0] == 401
