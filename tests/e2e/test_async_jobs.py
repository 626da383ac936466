"""`/v1/jobs` over real sockets: stored, executed, polled, cancelled, and reported to a real receiver."""

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferry.durable.callback_signature import sign
from support.async_job_gateway import BODY, CALLBACKS, Jobs
from support.callback_receiver import CallbackReceiver, Received
from support.tenant_gateway import CHAT, bearer
from support.waiting import until


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with Jobs(tmp_path_factory.mktemp("jobs")) as gateway:
        yield gateway


# -- polling -----------------------------------------------------------------------------------------------------------


def test_a_job_is_accepted_runs_in_lane_p2_and_has_its_answer(gateway: Jobs) -> None:
    answer = gateway.create(metadata={"ticket": "1"})
    assert answer.status == 202
    accepted = answer.json
    assert answer.headers["location"] == f"/v1/jobs/{accepted['id']}"
    assert (accepted["object"], accepted["lane"], accepted["response"]) == ("job", "P2", None)
    job = gateway.ended(accepted["id"])
    assert (job["status"], job["metadata"], job["callback"]) == ("completed", {"ticket": "1"}, None)
    assert job["response"]["status_code"] == 200
    assert job["response"]["body"]["choices"][0]["message"]["content"] == "one two three"
    assert job["created_at"] <= job["ended_at"] < job["expires_at"] == job["ended_at"] + 7 * 86_400
    (made,) = [one for plan in gateway.worker.plans for one in plan.jobs if one.run_id == job["id"]]
    assert (made.lane.name, made.step_id, made.tenant) == ("P2", job["id"], "acme")


def test_headers_choose_the_lane_the_run_and_the_deadline(gateway: Jobs) -> None:
    headers = {"x_inferry_lane": "P1", "x_inferry_run_id": "a-run", "x_inferry_step_id": "a-step"}
    accepted = gateway.create(**headers, x_inferry_deadline_ms="60000", x_inferry_parent_run_id="above").json
    assert (accepted["lane"], accepted["run_id"], accepted["step_id"]) == ("P1", "a-run", "a-step")
    assert accepted["deadline_at"] - accepted["created_at"] == pytest.approx(60, abs=1)
    gateway.ended(accepted["id"])
    (made,) = [one for plan in gateway.worker.plans for one in plan.jobs if one.run_id == "a-run"]
    assert (made.lane.name, made.step_id, made.parent_run) == ("P1", "a-step", "above")
    assert made.deadline is not None


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/messages"])
def test_other_apis_answer_in_their_own_shape(gateway: Jobs, endpoint: str) -> None:
    body = {"model": "m", "prompt": "x"} if endpoint == "/v1/completions" else {**BODY, "max_tokens": 5}
    job = gateway.ended(gateway.create(body, endpoint).json["id"])
    answer = job["response"]["body"]
    text = answer["choices"][0]["text"] if endpoint == "/v1/completions" else answer["content"][0]["text"]
    assert (job["status"], text) == ("completed", "one two three")


def test_an_error_of_the_request_is_the_answer_of_a_failed_job(gateway: Jobs) -> None:
    job = gateway.ended(gateway.create({**BODY, "model": "unknown"}).json["id"])
    assert (job["status"], job["response"]["status_code"]) == ("failed", 404)
    assert job["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("given", "headers", "code", "param"),
    [
        ({"endpoint": "/v1/jobs", "body": BODY}, {}, "invalid_request", "endpoint"),
        ({"endpoint": "/v1/nothing", "body": BODY}, {}, "invalid_request", "endpoint"),
        ({"endpoint": CHAT}, {}, "invalid_request", None),
        ({"endpoint": CHAT, "body": []}, {}, "invalid_request", "body"),
        ({"endpoint": CHAT, "body": {**BODY, "stream": True}}, {}, "invalid_request", "body.stream"),
        (
            {"endpoint": "/v1/responses", "body": {"model": "m", "input": "x", "background": True}},
            {},
            "invalid_request",
            "body.background",
        ),
        ({"endpoint": CHAT, "body": BODY, "metadata": {"k" * 65: ""}}, {}, "invalid_request", "metadata"),
        ({"endpoint": CHAT, "body": BODY, "more": 1}, {}, "invalid_request", None),
        ({"endpoint": CHAT, "body": BODY}, {"x-inferry-lane": "P7"}, "unknown_lane", "x-inferry-lane"),
        ({"endpoint": CHAT, "body": BODY}, {"x-inferry-deadline-ms": "x"}, "invalid_request", "x-inferry-deadline-ms"),
        (
            {"endpoint": CHAT, "body": BODY},
            {"x-inferry-template-id": "a b"},
            "invalid_request",
            "x-inferry-template-id",
        ),
        ({"endpoint": CHAT, "body": BODY}, {"x-inferry-max-wait-ms": "x"}, "invalid_request", "x-inferry-max-wait-ms"),
        (
            {"endpoint": CHAT, "body": BODY, "callback_url": "https://a b/"},
            {},
            "invalid_request",
            "callback_url",
        ),
        ({"endpoint": CHAT, "body": BODY, "callback_url": "https://10.1.2.3/"}, {}, "invalid_request", "callback_url"),
        (
            {"endpoint": CHAT, "body": BODY, "callback_url": "https://a.example/"},
            {},
            "invalid_request",
            "callback_url",
        ),
    ],
)
def test_what_cannot_be_a_job_is_refused(
    gateway: Jobs, given: Any, headers: dict[str, str], code: str, param: str | None
) -> None:
    nobody = gateway.key("without-secret")
    answer = gateway.call("POST", "/v1/jobs", given, {**bearer(nobody), **headers})
    assert (answer.status, answer.code) == (400, code)
    if param is not None:
        assert answer.json["error"]["param"] == param
    assert gateway.call("GET", "/v1/jobs", None, bearer(nobody)).json["data"] == []


def test_a_lane_above_that_of_the_key_is_refused(gateway: Jobs) -> None:
    low = gateway.key("low", limits={"max_lane": "P2"})
    assert gateway.create(key=low, x_inferry_lane="P1").code == "lane_not_allowed"
    assert gateway.create(key=low).status == 202


def test_jobs_are_listed_without_answers_in_pages(gateway: Jobs) -> None:
    key = gateway.key("lister")
    ids = [gateway.create(key=key).json["id"] for _ in range(5)]
    page = gateway.call("GET", "/v1/jobs?limit=2", None, bearer(key)).json
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids[:2:-1], True)
    rest = gateway.call("GET", f"/v1/jobs?limit=9&after={page['last_id']}", None, bearer(key)).json
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    assert {one["response"] is None for one in page["data"]} == {True}
    oldest = gateway.call("GET", "/v1/jobs?order=asc&limit=1", None, bearer(key)).json
    assert oldest["first_id"] == ids[0]


def test_a_repetition_with_the_same_idempotency_key_is_the_same_job(gateway: Jobs) -> None:
    first = gateway.create(idempotency_key="once").json
    assert gateway.create(idempotency_key="once").json["id"] == first["id"]
    assert gateway.create({**BODY, "temperature": 1}, idempotency_key="once").code == "conflict"
    assert gateway.create(idempotency_key="once", key=gateway.key("somebody-else")).json["id"] != first["id"]


def test_a_job_of_another_tenant_is_unknown(gateway: Jobs) -> None:
    id = gateway.create().json["id"]
    gateway.ended(id)
    other = gateway.key("globex")
    requests = [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/deliveries")]
    for method, rest in requests:
        theirs = gateway.call(method, f"/v1/jobs/{id}{rest}", None, bearer(other))
        none = gateway.call(method, f"/v1/jobs/job_none{rest}", None, bearer(other))
        assert (theirs.status, theirs.body) == (none.status, none.body) == (404, none.body)
    assert gateway.call("GET", "/v1/jobs", None, bearer(other)).json["data"] == []
    assert gateway.call("GET", f"/v1/jobs?after={id}", None, bearer(other)).json["data"] == []
    assert gateway.get(id)["status"] == "completed"


def test_a_deleted_job_is_gone_with_its_answer(gateway: Jobs) -> None:
    id = gateway.create().json["id"]
    gateway.ended(id)
    deleted = gateway.call("DELETE", f"/v1/jobs/{id}", None, bearer(gateway.acme))
    assert deleted.json == {"id": id, "object": "job", "deleted": True}
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/deliveries")):
        assert gateway.call(method, f"/v1/jobs/{id}{rest}", None, bearer(gateway.acme)).status == 404


# -- cancellation and limits -------------------------------------------------------------------------------------------


def hold(gateway: Jobs, *, back: bool) -> None:
    async def change() -> None:
        (gateway.worker.gate.clear if back else gateway.worker.gate.set)()

    gateway.run(change())


@pytest.mark.parametrize("method", ["cancel", "delete", "run", "data"])
def test_a_cancelled_job_frees_its_engine(tmp_path: Path, method: str) -> None:
    with Jobs(tmp_path) as gateway:
        hold(gateway, back=True)
        id = gateway.create().json["id"]
        until(lambda: gateway.service.gateway.in_flight == 1)
        if method == "cancel":
            answer = gateway.call("POST", f"/v1/jobs/{id}/cancel", None, bearer(gateway.acme))
            assert (answer.status, answer.json["status"], answer.json["response"]) == (200, "cancelled", None)
        elif method == "delete":
            assert gateway.call("DELETE", f"/v1/jobs/{id}", None, bearer(gateway.acme)).status == 200
        elif method == "data":
            assert gateway.as_admin("DELETE", "/admin/tenants/acme/data").json["jobs"] == 1
        else:
            assert gateway.call("DELETE", f"/v1/runs/{id}", None, bearer(gateway.acme)).status == 200
        until(lambda: gateway.service.gateway.in_flight == 0)
        until(lambda: len(gateway.worker.cancelled) == 1)
        if method in ("cancel", "run"):
            assert gateway.ended(id)["status"] == "cancelled"
            again = gateway.call("POST", f"/v1/jobs/{id}/cancel", None, bearer(gateway.acme))
            assert (again.status, again.json["status"]) == (200, "cancelled")
        hold(gateway, back=False)
        done = gateway.ended(gateway.create().json["id"])
        answer = gateway.call("POST", f"/v1/jobs/{done['id']}/cancel", None, bearer(gateway.acme))
        assert (answer.status, answer.code) == (409, "conflict")


def test_a_tenant_has_a_bounded_number_of_unfinished_jobs_and_bytes(tmp_path: Path) -> None:
    limits = {"max_jobs_per_tenant": 2, "max_bytes_per_tenant": 10_000}
    with Jobs(tmp_path, {"storage": limits}) as gateway:
        hold(gateway, back=True)
        for _ in range(2):
            assert gateway.create().status == 202
        refused = gateway.create()
        assert (refused.status, refused.code, "retry-after" in refused.headers) == (429, "queue_full", True)
        assert gateway.create(key=gateway.key("other")).status == 202
        large = {**BODY, "metadata": {"x": "y" * 10_000}}
        assert gateway.create(large).code == "storage_quota_exceeded"
        hold(gateway, back=False)
        until(lambda: gateway.create().status == 202)


def test_nothing_is_stored_where_storage_is_disabled(tmp_path: Path) -> None:
    with Jobs(tmp_path, {"storage": {"store": "never"}}) as gateway:
        assert gateway.create().code == "storage_disabled"
        assert gateway.call("GET", "/v1/jobs", None, bearer(gateway.acme)).code == "storage_disabled"


def test_a_job_expires_at_its_deadline_and_is_deleted_after_its_life(tmp_path: Path) -> None:
    with Jobs(tmp_path, {"storage": {"job_ttl_s": 0.5}, "callbacks": {"retry_for_s": 0.4}}) as gateway:
        hold(gateway, back=True)
        id = gateway.create(x_inferry_deadline_ms="300").json["id"]
        until(lambda: gateway.call("GET", f"/v1/jobs/{id}", None, bearer(gateway.acme)).status == 404)
        until(lambda: gateway.service.gateway.in_flight == 0)
        assert gateway.run(gateway.service.storage.sweeper.sweep()) >= 1
        hold(gateway, back=False)


def test_a_job_that_an_orderly_stop_cuts_off_completes_in_the_next_gateway(tmp_path: Path) -> None:
    with CallbackReceiver() as receiver:
        with Jobs(tmp_path, {"server": {"drain_timeout_s": 0.1}}) as gateway:
            gateway.secret()
            hold(gateway, back=True)
            id = gateway.create(callback_url=receiver.url).json["id"]
            until(lambda: gateway.service.gateway.in_flight == 1)
        assert receiver.received == []
        with Jobs(tmp_path) as gateway:
            assert delivered(gateway, id)["status"] == "delivered"
            job = gateway.get(id)
            assert (job["status"], job["response"]["status_code"]) == ("completed", 200)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def is_signed(one: Received, key: bytes) -> bool:
    headers = one.headers
    found = headers["webhook-signature"].split()
    return sign(key, headers["webhook-id"], int(headers["webhook-timestamp"]), one.body) in found


def delivered(gateway: Jobs, id: str) -> Any:
    until(lambda: gateway.get(id)["callback"]["status"] not in ("waiting", "pending"))
    return gateway.get(id)["callback"]


def test_a_receiver_that_fails_first_gets_the_result_in_the_end(tmp_path: Path) -> None:
    failures = iter([500, 302, 429])
    lock = threading.Lock()

    def answer(one: Received) -> int:
        with lock:
            return next(failures, 204)

    with CallbackReceiver(answer) as receiver, Jobs(tmp_path) as gateway:
        key = gateway.secret()
        id = gateway.create(callback_url=f"{receiver.url}/in?x=1", metadata={"of": "me"}).json["id"]
        found = delivered(gateway, id)
        assert (found["status"], found["attempts"]) == ("delivered", 4)
        assert found["delivered_at"] is not None
        assert [one.path for one in receiver.received] == ["/in?x=1"] * 4, "the redirect is not followed"
        assert all(is_signed(one, key) for one in receiver.received)
        assert len({one.body for one in receiver.received}) == 1
        event = receiver.received[0].json
        assert (event["type"], event["data"]["id"], event["data"]["metadata"]) == ("job.completed", id, {"of": "me"})
        assert event["data"]["response"]["body"]["choices"][0]["message"]["content"] == "one two three"
        log = gateway.call("GET", f"/v1/jobs/{id}/deliveries", None, bearer(gateway.acme))
        assert [one["status"] for one in log.json["data"]] == [500, 302, 429, 204]
        assert [one["number"] for one in log.json["data"]] == [1, 2, 3, 4]
        assert b"question" not in log.body


def test_every_end_of_a_job_is_reported(tmp_path: Path) -> None:
    with CallbackReceiver() as receiver, Jobs(tmp_path) as gateway:
        gateway.secret()
        failed = gateway.create({**BODY, "model": "unknown"}, callback_url=receiver.url).json["id"]
        assert delivered(gateway, failed)["status"] == "delivered"
        hold(gateway, back=True)
        cancelled = gateway.create(callback_url=receiver.url).json["id"]
        gateway.call("POST", f"/v1/jobs/{cancelled}/cancel", None, bearer(gateway.acme))
        expired = gateway.create(callback_url=receiver.url, x_inferry_deadline_ms="100").json["id"]
        for id, status in ((failed, "failed"), (cancelled, "cancelled"), (expired, "expired")):
            delivered(gateway, id)
            assert [one.json["type"] for one in receiver.of(id)] == [f"job.{status}"]
        hold(gateway, back=False)


def test_an_internal_address_is_never_connected_to(tmp_path: Path) -> None:
    rules = {"allow_http": True, "initial_backoff_s": 0.05, "max_backoff_s": 0.1, "retry_for_s": 1.0}
    with CallbackReceiver() as receiver, Jobs(tmp_path, {"callbacks": rules}) as gateway:
        gateway.secret()
        assert gateway.create(callback_url=receiver.url).json["error"]["param"] == "callback_url"
        id = gateway.create(callback_url=receiver.url.replace("127.0.0.1", "localhost")).json["id"]
        assert delivered(gateway, id)["status"] == "failed"
        log = gateway.call("GET", f"/v1/jobs/{id}/deliveries", None, bearer(gateway.acme)).json["data"]
        assert {(one["status"], one["error"]) for one in log} == {(None, "forbidden")}
        assert len(log) > 1
        assert receiver.received == []


def test_a_rotated_secret_signs_beside_the_earlier_one_until_its_grace_ends(tmp_path: Path) -> None:
    with CallbackReceiver() as receiver, Jobs(tmp_path) as gateway:
        old = gateway.secret()
        new = gateway.secret(grace_s=600)
        both = gateway.create(callback_url=receiver.url).json["id"]
        delivered(gateway, both)
        assert [is_signed(receiver.of(both)[0], key) for key in (old, new)] == [True, True]
        newest = gateway.secret(grace_s=0)
        one = gateway.create(callback_url=receiver.url).json["id"]
        delivered(gateway, one)
        assert [is_signed(receiver.of(one)[0], key) for key in (old, new, newest)] == [False, False, True]
        listed = gateway.as_admin("GET", "/admin/tenants/acme/callback-secrets")
        assert [secret["status"] for secret in listed.json["callback_secrets"]] == ["valid", "expired", "expired"]
        for key in (old, new, newest):
            assert base64.b64encode(key) not in listed.body
        assert gateway.call("POST", "/admin/tenants/acme/callback-secrets", {}, bearer(gateway.acme)).status == 403
        assert gateway.as_admin("POST", "/admin/tenants/acme/callback-secrets", {"grace_s": -1}).status == 400
        for method in ("GET", "POST"):
            assert gateway.as_admin(method, "/admin/tenants/a%20b/callback-secrets").status == 400


def test_secrets_prompts_and_addresses_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), CallbackReceiver(lambda _: 500) as receiver:
        config = {"callbacks": {**CALLBACKS, "retry_for_s": 0.5}}
        with Jobs(tmp_path, config) as gateway:
            key = gateway.secret()
            id = gateway.create(callback_url=f"{receiver.url}/?token=canary", metadata={"m": "canary"}).json["id"]
            assert delivered(gateway, id)["status"] == "failed"
    assert "given up" in caplog.text
    for hidden in ("canary", "the question", "one two", base64.b64encode(key).decode()):
        assert hidden not in caplog.text
