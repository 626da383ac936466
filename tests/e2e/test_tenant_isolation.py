"""Two tenants at one gateway, one of which means harm: what it guesses, spoofs, measures and reads tells it nothing.

`acme` attacks, `globex` has something to lose. Every secret of globex has a word in it that is looked for in whatever
acme gets to see.
"""

import asyncio
import http.client
import json
import socket
from pathlib import Path

import pytest

from e2e.isolation_gateway import CALL, RUN, STEP, THEIRS, WORD, House, told
from support.http_gateway import HttpGateway
from support.tenant_gateway import CHAT, TenantGateway, bearer

# -- ids guessed -----------------------------------------------------------------------------------------------------


def test_a_run_of_another_tenant_is_not_found(env: House) -> None:
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


def test_the_same_run_id_of_two_tenants_is_two_runs_over_http(env: House) -> None:
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


def test_with_two_keys_only_the_bearer_token_is_used(env: House) -> None:
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
def test_harness_session_headers_are_scoped_by_tenant(env: House, headers: dict[str, str], run: str) -> None:
    sent = {("session_id" if name == "session_id" else name.replace("_", "-")): headers[name] for name in headers}
    for key in (env.globex, env.acme):
        assert env.call("POST", CHAT, CALL, {"authorization": f"Bearer {key}", **sent}).status == 200
    for key in (env.acme, env.globex):
        assert env.as_seen_by(key, "GET", f"/v1/runs/{run}").json["tree"]["jobs"] == 1
    assert env.as_seen_by(env.acme, "DELETE", f"/v1/runs/{run}").status == 200
    assert env.call("POST", CHAT, CALL, {"authorization": f"Bearer {env.globex}", **sent}).status == 200


def test_admin_and_tenant_keys_are_not_interchangeable(env: House) -> None:
    for path in ("/admin/keys", "/admin/tenants", "/admin/workers", "/admin/tenants/globex", "/%61dmin/keys"):
        answer = env.as_seen_by(env.acme, "GET", path)
        assert (answer.status, answer.code) == (403, "admin_only")
        assert "globex" not in answer.body.decode()
    assert env.as_admin("GET", "/v1/models").status == 401
    assert env.as_admin("POST", CHAT, CALL).status == 401


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
            assert gateway.call("POST", CHAT, stolen.encode(), bearer(acme)).status == 200
        assert gateway.call("POST", CHAT, {**body, "cache_salt": None}, bearer(acme)).status == 200
        salts = [sent["cache_salt"] for sent in gateway.upstream.bodies]
        assert salts[1:] == [salts[1], salts[1], salts[3], salts[1], salts[1], salts[1]], "a tenant has its own salt"
        assert len({salts[0], salts[1], salts[3]}) == 3, "a stolen salt only separates the thief's own cache further"
        assert not {"acme", "globex"} & set(salts)
        for headers in gateway.upstream.headers:
            assert headers["authorization"] == "Bearer sk-upstream-key"
            told_upstream = json.dumps(headers)
            assert not any(key in told_upstream for key in (acme, acme_too, globex))
            assert "globex" not in told_upstream


def test_the_embedded_engine_shares_no_prefix_between_tenants(tmp_path: Path, tiny_model: Path) -> None:
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    with TenantGateway(tmp_path, None, {"workers": [worker]}) as gateway:
        acme, globex = gateway.key("acme"), gateway.key("globex")
        body = {"model": "tiny", "prompt": f"{WORD} " * 60, "max_tokens": 2, "temperature": 0}
        answers = [gateway.call("POST", "/v1/completions", body, bearer(key)) for key in (globex, globex, acme)]
        usages = [one.json["usage"] for one in answers]
        first, again, other = (one["prompt_tokens_details"]["cached_tokens"] for one in usages)
        assert (first, other) == (0, 0)
        assert again > 0
        assert answers[1].json["choices"] == answers[0].json["choices"]
        assert {one["completion_tokens"] for one in usages} == {2}
        assert not any("x-inferry-shared-with" in one.headers for one in answers)


def test_a_slowly_read_stream_reaches_only_its_own_client(env: House) -> None:
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
