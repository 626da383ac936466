"""The OpenAPI document has exactly what the application serves."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from inferry.ingress.admin import PATHS as ADMIN_PATHS
from inferry.ingress.admin import is_admin_path
from inferry.ingress.app import App
from inferry.ingress.dashboard import values
from inferry.ingress.dashboard.static import PATHS as FILE_PATHS
from inferry.ingress.openapi import document as openapi
from inferry.ingress.openapi import responses, timeline_responses
from inferry.ingress.openapi.operation import error_kinds
from inferry.ingress.runs import PATHS as RUN_PATHS
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, TenantGateway, bearer

CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantGateway]:
    with TenantGateway(tmp_path_factory.mktemp("openapi"), lambda: ([ScriptedWorker()], {})) as serving:
        yield serving


@pytest.fixture(scope="module")
def key(gateway: TenantGateway) -> str:
    return gateway.key("acme")


def routes(app: App) -> set[tuple[str, str]]:
    """What the application looks requests up in."""
    found = {("post", path.decode()) for path in app._posts} | {("get", path) for path in app._gets}
    mounted = [path for router in app._routers for path in router.paths]
    for one in (*RUN_PATHS, *FILE_PATHS, *mounted, *ADMIN_PATHS):
        method, _, path = one.partition(" ")
        found.add((method.lower(), path))
    return found


def documented() -> set[tuple[str, str]]:
    return {(method, path) for path, methods in openapi.document()["paths"].items() for method in methods}


def test_the_document_lists_exactly_the_served_paths(gateway: TenantGateway) -> None:
    assert documented() == routes(gateway.service.app)


def test_the_document_needs_no_key(gateway: TenantGateway) -> None:
    answer = gateway.call("GET", "/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == openapi.document()
    assert answer.json["openapi"] == "3.1.0"


@pytest.mark.parametrize("path", sorted({path for _, path in documented()}))
def test_methods_that_are_documented_are_taken_and_others_are_not(gateway: TenantGateway, key: str, path: str) -> None:
    there = path.replace("{id}", "nobody").replace("{name}", "nobody").replace("{model}", "nobody")
    known = {method for method, one in documented() if one == path}
    for method in ("get", "put", "post", "delete", "patch", "options"):
        say = gateway.as_admin if is_admin_path(path) else None
        if say is not None:
            answer = say(method.upper(), there, b"{}")
        else:
            answer = gateway.call(method.upper(), there, b"{}", bearer(key))
        if method in known:
            assert answer.status not in (405, 500, 501), method
            code = answer.code if answer.status >= 400 and "error" in (answer.json or {}) else None
            assert str(answer.status) in openapi.document()["paths"][path][method]["responses"], (method, code)
        else:
            assert answer.status == 405, method
            assert {one.strip().lower() for one in answer.headers["allow"].split(",")} - {"head"} == known


def test_every_reference_leads_somewhere_and_nothing_is_left_over() -> None:
    document = openapi.document()
    named: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name == "$ref":
                    named.add(inner)
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(document)
    there = {
        f"#/components/{kind}/{name}"
        for kind, parts in document["components"].items()
        for name in parts
        if kind != "securitySchemes"
    }
    assert named == there
    schemes = {
        name for ops in document["paths"].values() for op in ops.values() for one in op["security"] for name in one
    }
    assert schemes == set(document["components"]["securitySchemes"])


def test_every_error_code_is_named_with_its_status() -> None:
    found: set[tuple[int, str]] = set()
    for methods in openapi.document()["paths"].values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                schema = answer["content"].get("application/json", {}).get("schema", {})
                if "allOf" in schema:
                    codes = schema["allOf"][1]["properties"]["error"]["properties"]["code"]["enum"]
                    found |= {(int(status), code) for code in codes}
    # Of methods that are not there nothing can be said at those that are.
    assert found | {(405, "method_not_allowed")} == {(kind.status, kind.code) for kind in error_kinds()}


def test_responses_match_the_openapi_document(gateway: TenantGateway, key: str) -> None:
    def read(kind: Any, method: str, path: str, body: Any = None) -> Any:
        sent = gateway.as_admin if is_admin_path(path) else None
        answer = gateway.call(method, path, body, bearer(key)) if sent is None else sent(method, path, body)
        assert answer.status in (200, 201), answer.body
        return msgspec.json.decode(answer.body, type=kind)

    for run, parent in (("outer", None), ("inner", "outer")):
        headers = bearer(key, x_inferry_run_id=run, **({"x_inferry_parent_run_id": parent} if parent else {}))
        assert gateway.call("POST", CHAT, CALL, headers).status == 200
    read(responses.ChatCompletion, "POST", CHAT, CALL)
    read(responses.ChatCompletion, "POST", CHAT, {**CALL, "service_tier": "flex"})
    read(responses.Completion, "POST", "/v1/completions", {"model": "m", "prompt": "a"})
    read(responses.Model, "GET", "/v1/models/m")
    read(responses.ModelList, "GET", "/v1/models")
    assert read(responses.RunDetail, "GET", "/v1/runs/outer").sub_runs == ["inner"]
    assert {one.id for one in read(responses.RunList, "GET", "/v1/runs").data} >= {"outer", "inner"}
    read(timeline_responses.RunTimeline, "GET", "/v1/runs/outer/timeline")
    read(timeline_responses.PerfettoTrace, "GET", "/v1/runs/outer/timeline?format=perfetto")
    read(responses.RunDetail, "POST", "/v1/runs/inner/finish")
    read(responses.CancelledRun, "DELETE", "/v1/runs/outer")
    read(responses.WorkerList, "GET", "/admin/workers")
    read(values.Overview, "GET", "/admin/overview")
    read(values.SessionState, "GET", "/admin/session")
    assert {one.id for one in read(values.RunStates, "GET", "/admin/runs").runs} >= {"outer"}
    read(responses.RunDetail, "GET", "/admin/runs/outer?tenant=acme")
    limits = {"max_lane": "P1", "models": ["m", "n*"], "tokens_per_minute": 7, "run_money_ceiling": 0.5}
    read(responses.TenantDetail, "PUT", "/admin/tenants/new", limits)
    read(responses.TenantList, "GET", "/admin/tenants")
    made = read(responses.CreatedKey, "POST", "/admin/keys", {"tenant": "new", "limits": {"max_concurrent": 2}})
    read(responses.CreatedKey, "POST", f"/admin/keys/{made.id}/rotate")
    read(responses.KeyDetail, "DELETE", f"/admin/keys/{made.id}")
    read(responses.KeyList, "GET", "/admin/keys?tenant=new")
    read(responses.RemovedTenant, "DELETE", "/admin/tenants/new")
    read(responses.Index, "GET", "/")
    read(responses.Ready, "GET", "/ready")
    read(responses.Health, "GET", "/health")


def test_stream_events_match_the_openapi_document(gateway: TenantGateway, key: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for path, body, kind in (
        (CHAT, CALL, responses.ChatCompletionChunk),
        ("/v1/completions", {"model": "m", "prompt": "a"}, responses.Completion),
    ):
        answer = gateway.call("POST", path, {**body, **options}, bearer(key))
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = answer.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert len([msgspec.json.decode(one.removeprefix("data: "), type=kind) for one in events]) >= 4


def bounds() -> Iterator[tuple[str, float, bool]]:
    fields = openapi.document()["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for name, schema in fields.items():
        for one in schema.get("anyOf", []):
            step = 1 if one.get("type") == "integer" else 0.01
            if "minimum" in one:
                yield name, one["minimum"], True
                yield name, one["minimum"] - step, False
            if "exclusiveMinimum" in one:
                yield name, one["exclusiveMinimum"], False
                yield name, one["exclusiveMinimum"] + step, True
            if "maximum" in one and name not in (
                "max_tokens",
                "max_completion_tokens",
            ):  # the context bounds them first
                yield name, one["maximum"], True
                yield name, one["maximum"] + step, False


@pytest.mark.parametrize(("name", "value", "is_fine"), list(bounds()))
def test_bounds_match_the_openapi_document(
    gateway: TenantGateway, key: str, name: str, value: float, is_fine: bool
) -> None:
    answer = gateway.call("POST", CHAT, {**CALL, name: value}, bearer(key))
    wrong = answer.status == 400 and answer.code == "invalid_request"
    assert wrong is not is_fine, answer.body


def test_a_run_with_odd_characters_is_found_under_its_own_name(gateway: TenantGateway, key: str) -> None:
    for run in ("a/b", "a%2Fb", "?x=1", "#", "...", "a/finish", "%00"):
        assert gateway.call("POST", CHAT, CALL, bearer(key, x_inferry_run_id=run)).status == 200
        assert gateway.call("GET", f"/v1/runs/{quote(run, safe='')}", headers=bearer(key)).json["id"] == run
