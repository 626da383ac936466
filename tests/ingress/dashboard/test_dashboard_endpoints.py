"""The dashboard over HTTP: its files, its data, the runs of all tenants, and which requests are refused."""

import gzip
import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferry.ingress.dashboard import feed
from inferry.ingress.dashboard.sessions import MAX_FAILURES
from inferry.ingress.dashboard.values import Overview, Timeline
from support.scripted_gateway import ScriptedGateway
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import ADMIN_KEY, CHAT, Answer, TenantGateway, bearer

CANARY = "canary-77e0c1"
CALL = {"model": "m", "messages": [{"role": "user", "content": CANARY}]}
OWN_PAGE = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantGateway]:
    with TenantGateway(tmp_path_factory.mktemp("dashboard"), lambda: ([ScriptedWorker()], {})) as serving:
        yield serving


def ask(gateway: ScriptedGateway, method: str, path: str, headers: dict[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        data = response.read()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data)
    finally:
        connection.close()


# -- files -----------------------------------------------------------------------------------------------------------


def test_browsers_get_the_page_and_other_clients_the_list_of_endpoints(gateway: TenantGateway) -> None:
    page = gateway.call("GET", "/", headers={"accept": "text/html,*/*"})
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    index = gateway.call("GET", "/", headers={"accept": "*/*"})
    assert index.json["name"] == "inferry"
    assert page.headers["vary"].startswith("accept")
    assert index.headers["vary"] == "accept"


def files_of(gateway: TenantGateway) -> set[str]:
    """Every file that the page names, and those that these name."""
    found: set[str] = set()
    todo = ["/"]
    while todo:
        body = gateway.call("GET", todo.pop(), headers={"accept": "text/html"}).body.decode("latin-1")
        names = set(re.findall(r'"(/dashboard/[\w./]+)"', body))
        names |= {f"/dashboard/{name}" for name in re.findall(r'from "\./([\w.]+)"', body)}
        todo += names - found
        found |= names
    return found


def test_every_file_of_the_page_is_served_with_strict_headers(gateway: TenantGateway) -> None:
    files = files_of(gateway)
    assert {f"/dashboard/{name}" for name in ("app.js", "base.css", "charts.js", "vendor/inter.woff2")} <= files
    for path in {"/", *files}:
        answer = gateway.call("GET", path, headers={"accept": "text/html"})
        assert answer.status == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in answer.headers
        assert ADMIN_KEY.encode() not in answer.body


def test_the_page_has_no_inline_script_and_no_inline_style(gateway: TenantGateway) -> None:
    page = gateway.call("GET", "/", headers={"accept": "text/html"}).body.decode()
    assert re.findall(r"<script(?![^>]* src=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    for path in files_of(gateway):
        body = gateway.call("GET", path).body
        assert re.findall(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", body) == []


def test_a_file_that_the_browser_has_is_not_sent_again(gateway: TenantGateway) -> None:
    first = gateway.call("GET", "/dashboard/app.js")
    again = gateway.call("GET", "/dashboard/app.js", headers={"if-none-match": f'"x", {first.headers["etag"]}'})
    assert (again.status, again.body) == (304, b"")
    assert gateway.call("GET", "/dashboard/app.js", headers={"if-none-match": '"x"'}).status == 200
    packed = gateway.call("GET", "/dashboard/app.js", headers={"accept-encoding": "br, gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == first.body


@pytest.mark.parametrize("name", ["no.js", "", "../__init__.py", "%2e%2e/history.py", "vendor", "vendor/inter.LICENSE"])
def test_only_files_of_the_page_are_served(gateway: TenantGateway, name: str) -> None:
    assert gateway.call("GET", f"/dashboard/{name}").status == 404


# -- data ------------------------------------------------------------------------------------------------------------


def test_the_overview_has_lanes_workers_runs_and_no_prompt(gateway: TenantGateway) -> None:
    key = gateway.key("acme")
    assert gateway.call("POST", CHAT, CALL, bearer(key, x_inferry_run_id="visible")).status == 200
    answer = gateway.as_admin("GET", "/admin/overview")
    found = msgspec.json.decode(answer.body, type=Overview)
    assert [lane.lane for lane in found.lanes] == ["P0", "P1", "P2"]
    assert [lane.ttft_target_ms for lane in found.lanes] == [500, 2000, None]
    assert [worker.name for worker in found.workers] == ["scripted"]
    assert ("acme", "visible", 1) in [(run.tenant, run.id, run.calls) for run in found.runs]
    # A slow machine may raise alerts on latency.
    assert found.alerts is not None
    assert not [alert for alert in found.alerts if alert.severity == "critical"]
    assert CANARY.encode() not in answer.body
    assert "no-store" in answer.headers["cache-control"]


def test_the_timeline_of_a_run_has_its_attempts_and_no_prompt(gateway: TenantGateway) -> None:
    key = gateway.key("acme")
    for step in ("one", "two"):
        headers = bearer(key, x_inferry_run_id="a/b c".replace(" ", "+"), x_inferry_step_id=step)
        assert gateway.call("POST", CHAT, CALL, headers).status == 200
    path = "/admin/runs/a%2Fb+c/timeline?tenant=acme"
    answer = gateway.as_admin("GET", path)
    while answer.status == 404 or len(answer.json["steps"]) < 2:  # until the ledger has written the rows
        answer = gateway.as_admin("GET", path)
    steps = msgspec.json.decode(answer.body, type=Timeline).steps
    assert [one.step_id for one in steps] == ["one", "two"]
    for one in steps:
        assert one.sent_at is not None
        assert one.first_token_at is not None
        assert one.ended_at is not None
        assert one.arrived_at <= one.sent_at <= one.first_token_at <= one.ended_at
        assert (one.worker, one.status, one.lane) == ("scripted", "done", "P1")
        assert one.decision is not None
        assert "Sent to scripted" in one.decision
    assert CANARY.encode() not in answer.body
    trace = gateway.as_admin("GET", f"{path}&format=perfetto")
    assert [one["args"]["name"] for one in trace.json["traceEvents"] if one["ph"] == "M"][:2] == ["run a/b+c", "one"]
    assert CANARY.encode() not in trace.body
    assert gateway.as_admin("GET", f"{path}&format=other").code == "invalid_request"
    detail = gateway.as_admin("GET", "/admin/runs/a%2Fb+c?tenant=acme")
    assert (detail.json["id"], detail.json["jobs"]["done"]) == ("a/b+c", 2)
    assert CANARY.encode() not in detail.body


def test_runs_of_another_tenant_and_wrong_queries_are_refused(gateway: TenantGateway) -> None:
    key = gateway.key("acme")
    assert gateway.call("POST", CHAT, CALL, bearer(key, x_inferry_run_id="mine")).status == 200
    assert gateway.as_admin("GET", "/admin/runs/mine?tenant=other").code == "run_not_found"
    for query in ("", "?tenant=", "?tenant=a&tenant=b", "?tenant=acme&nonsense=1"):
        assert gateway.as_admin("GET", f"/admin/runs/mine{query}").code == "invalid_request"
        assert gateway.as_admin("GET", f"/admin/runs/mine/timeline{query}").code == "invalid_request"
    assert gateway.as_admin("POST", "/admin/runs/mine/finish?tenant=acme").status == 404


def test_an_operator_cancels_a_run_of_any_tenant(gateway: TenantGateway) -> None:
    key = gateway.key("acme")
    assert gateway.call("POST", CHAT, CALL, bearer(key, x_inferry_run_id="doomed")).status == 200
    assert gateway.as_admin("DELETE", "/admin/runs/doomed?tenant=acme").json["status"] == "cancelled"
    assert gateway.call("POST", CHAT, CALL, bearer(key, x_inferry_run_id="doomed")).code == "run_cancelled"
    listed = gateway.as_admin("GET", "/admin/runs").json["runs"]
    assert ("acme", "doomed", "cancelled") in [(run["tenant"], run["id"], run["status"]) for run in listed]


def read_event(response: http.client.HTTPResponse) -> tuple[str, Any]:
    name = response.readline()
    data = response.readline()
    assert response.readline() == b"\n"
    return name.decode().removeprefix("event: ").strip(), json.loads(data.decode().removeprefix("data: "))


def next_state(response: http.client.HTTPResponse) -> Any:
    while True:
        name, state = read_event(response)
        if name == "live":
            return state


def open_stream(
    gateway: TenantGateway, cookie: str | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """The stream of a session, or with the admin key."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120)
    permission = bearer(ADMIN_KEY) if cookie is None else {"cookie": cookie}
    connection.request("GET", "/admin/overview/stream", headers={**permission, "accept": "text/event-stream"})
    return connection, connection.getresponse()


def test_a_stream_sends_the_course_first_and_then_the_state_again_and_again(gateway: TenantGateway) -> None:
    connection, response = open_stream(gateway)
    assert response.headers["content-type"].startswith("text/event-stream")
    name, series = read_event(response)
    assert (name, [lane["lane"] for lane in series["lanes"]]) == ("series", ["P0", "P1", "P2"])
    states = [next_state(response) for _ in range(3)]
    times = [state["at"] for state in states]
    assert times == sorted(set(times))
    assert CANARY not in json.dumps([series, states])
    connection.close()


def test_a_client_that_asks_for_no_event_stream_gets_one_state(gateway: TenantGateway) -> None:
    answer = gateway.as_admin("GET", "/admin/overview/stream")
    assert re.findall(rb"^event: (\w+)$", answer.body, re.MULTILINE) == [b"series", b"live"]


def test_all_viewers_get_the_same_bytes_and_their_number_is_bounded(
    gateway: TenantGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 5)
    dashboard = gateway.service.app._admin.dashboard
    assert dashboard is not None
    while dashboard._feed.viewers:  # those of earlier tests
        time.sleep(0.01)
    streams = [open_stream(gateway) for _ in range(5)]
    assert [response.status for _, response in streams] == [200] * 5
    connection, refused = open_stream(gateway)
    assert refused.status == 429
    connection.close()
    *others, (_, last) = streams
    next_state(last)
    shown = next_state(last)
    for _, response in others:
        state = next_state(response)
        while state["at"] < shown["at"]:
            state = next_state(response)
        assert state == shown
    for connection, _ in streams:
        connection.close()


# -- access -----------------------------------------------------------------------------------------------------------


def test_without_an_admin_key_the_page_on_this_machine_is_admitted(scripted: ScriptedGateway) -> None:
    assert ask(scripted, "GET", "/admin/overview", OWN_PAGE).status == 200
    session = ask(scripted, "GET", "/admin/session", OWN_PAGE).json
    assert (session["needs_key"], session["signed_in"]) == (False, True)
    for path in ("/admin/overview", "/admin/overview/stream", "/admin/runs", "/admin/workers"):
        for headers in (
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "none"},
            {"origin": scripted.url},
            {**OWN_PAGE, "host": "evil.example"},
            {**OWN_PAGE, "x-forwarded-for": "10.0.0.1"},
        ):
            assert ask(scripted, "GET", path, headers).code == "admin_only", (path, headers)
    for headers in ({**OWN_PAGE, "host": "evil.example"}, {**OWN_PAGE, "via": "x"}, {"sec-fetch-site": "cross-site"}):
        assert ask(scripted, "GET", "/admin/session", headers).json["csrf"] is None
    assert ask(scripted, "POST", "/admin/session", OWN_PAGE).code == "admin_only"


def test_without_an_admin_key_an_action_of_the_page_needs_its_token(scripted: ScriptedGateway) -> None:
    token = ask(scripted, "GET", "/admin/session", OWN_PAGE).json["csrf"]
    path = "/admin/workers/nobody/drain"
    assert ask(scripted, "POST", path, OWN_PAGE).code == "admin_only"
    assert ask(scripted, "POST", path, {**OWN_PAGE, "x-inferry-csrf": "x"}).code == "admin_only"
    assert ask(scripted, "POST", path, {"sec-fetch-site": "cross-site", "x-inferry-csrf": token}).code == "admin_only"
    assert ask(scripted, "POST", path, {**OWN_PAGE, "x-inferry-csrf": token}).code == "not_found"


def sign_in(gateway: TenantGateway, **more: str) -> tuple[str, str]:
    """The cookie and the token of a new session."""
    answer = gateway.call("POST", "/admin/session", headers=bearer(ADMIN_KEY, **more))
    assert answer.status == 200
    return answer.headers["set-cookie"], answer.json["csrf"]


def test_the_admin_key_buys_a_cookie_that_reads_and_acts_with_its_token(gateway: TenantGateway) -> None:
    set_cookie, token = sign_in(gateway)
    cookie, *attributes = set_cookie.split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/admin"} <= set(attributes)
    assert "Secure" not in attributes
    assert "Secure" in sign_in(gateway, x_forwarded_proto="https")[0].split("; ")
    assert ADMIN_KEY not in set_cookie
    session = {"cookie": cookie}
    assert gateway.call("GET", "/admin/overview", headers=session).status == 200
    assert gateway.call("GET", "/admin/session", headers=session).json["csrf"] == token
    own = {**session, "origin": gateway.url}
    drain = "/admin/workers/nobody/drain"
    assert gateway.call("POST", drain, headers=own).code == "admin_only"
    assert gateway.call("POST", drain, headers={**own, "x-inferry-csrf": token}).code == "not_found"
    foreign = {**session, "origin": "https://evil.example", "x-inferry-csrf": token}
    assert gateway.call("POST", drain, headers=foreign).code == "admin_only"
    assert gateway.call("POST", "/admin/keys", {"tenant": "x"}, {**own, "x-inferry-csrf": token}).code == "admin_only"
    assert gateway.call("GET", "/admin/overview", headers={**session, "authorization": "Bearer x"}).code == "admin_only"
    assert gateway.call("GET", "/admin/overview").code == "admin_only"


def test_signing_out_ends_the_session_and_its_streams(gateway: TenantGateway) -> None:
    cookie, others = (sign_in(gateway)[0].split(";")[0] for _ in range(2))
    connection, response = open_stream(gateway, cookie=cookie)
    read_event(response)
    ended = gateway.call("DELETE", "/admin/session", headers={"cookie": cookie, "origin": gateway.url})
    assert "Max-Age=0" in ended.headers["set-cookie"]
    assert gateway.call("GET", "/admin/overview", headers={"cookie": cookie}).code == "admin_only"
    assert gateway.call("GET", "/admin/session", headers={"cookie": cookie}).json["signed_in"] is False
    assert gateway.call("GET", "/admin/overview", headers={"cookie": others}).status == 200
    assert any(read_event(response)[0] == "end" for _ in range(60)), "a second of events each"
    connection.close()


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin/workers"), ("POST", "/admin/keys")])
def test_wrong_keys_of_tools_lock_nobody_out(tmp_path: Path, method: str, path: str) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        cookie = sign_in(gateway)[0].split(";")[0]
        for _ in range(10):
            assert gateway.call("GET", "/admin/workers").status == 403, "a request without a key guesses nothing"
        body = {"tenant": "x"} if method == "POST" else None
        found = [gateway.call(method, path, body, bearer("wrong")).status for _ in range(MAX_FAILURES + 1)]
        assert found == [403] * (MAX_FAILURES + 1)
        assert gateway.as_admin("GET", "/admin/workers").status == 200
        assert gateway.call("POST", "/admin/session", headers=bearer(ADMIN_KEY)).status == 200
        assert gateway.call("GET", "/admin/overview", headers={"cookie": cookie}).status == 200


def test_failed_sign_ins_are_limited(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        for number in range(MAX_FAILURES):
            body = b"x" * number  # a body makes no difference
            answer = gateway.call("POST", "/admin/session", body, bearer("wrong"))
            assert (answer.status, answer.code) == (403, "admin_only")
        answer = gateway.call("POST", "/admin/session", headers=bearer(ADMIN_KEY))
        assert (answer.status, answer.code) == (429, "rate_limited")
        assert int(answer.headers["retry-after"]) >= 1


def test_a_session_outlives_a_restart(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        cookie = sign_in(gateway)[0].split(";")[0]
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        assert gateway.call("GET", "/admin/overview", headers={"cookie": cookie}).status == 200


def test_viewers_do_not_delay_a_shutdown(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {}), {"server": {"drain_timeout_s": 600}}) as gateway:
        connection, response = open_stream(gateway)
        read_event(response)
        gateway.stop()
        gateway.join()
        assert response.read().endswith(b"event: end\ndata: {}\n\n")
        connection.close()
