"""A revoked key ends its calls: running ones in-band, queued ones with 401; calls of other keys continue."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.ledger import Outcome
from inferry.domain.tenants import Tenant
from inferry.domain.workers import Capacity
from inferry.ledger.stores.opening import open_queries
from inferry.ledger.stores.tenants import TenantStore
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, Answer, TenantGateway
from support.waiting import until


class Talking(TenantGateway):
    """A gateway whose one worker says a word and then falls silent, for two calls at a time."""

    worker: ScriptedWorker

    def __init__(self, directory: Path, **more: Any) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
            self.worker = ScriptedWorker(words=("one", " two"), capacity=Capacity(sequences=2), pause_s=3600.0)
            return [self.worker], {}

        super().__init__(directory, make, more)


class Client(threading.Thread):
    """One call, made in the background."""

    def __init__(self, gateway: Talking, key: str, *, stream: bool = True, **body: Any) -> None:
        super().__init__(daemon=True)
        self._gateway = gateway
        self._headers = {"authorization": f"Bearer {key}"}
        said = {"role": "user", "content": "hi"}
        self._body = {"model": "m", "messages": [said], "max_tokens": 50, "stream": stream, "temperature": 1, **body}
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._gateway.call("POST", CHAT, self._body, self._headers)

    def result(self) -> Answer:
        self.join(30)
        assert self.answer is not None, "the call went on"
        return self.answer


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Talking]:
    with Talking(tmp_path, server={"drain_timeout_s": 0.0}) as gateway:
        yield gateway


def error_of(answer: Answer) -> tuple[int, Any]:
    """The status, and the code of the error in the body or in the stream."""
    if answer.json is not None:
        return answer.status, answer.code
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    return answer.status, next((event["error"]["code"] for event in events if "error" in event), None)


def id_of(key: str) -> str:
    return key.split("_")[1]


def store_of(gateway: Talking) -> TenantStore:
    """The database as another process has it open."""
    return TenantStore(gateway.config.ledger)


def test_running_and_queued_calls_of_a_revoked_key_end_and_others_continue(gateway: Talking) -> None:
    key, other = gateway.key("acme"), gateway.key("acme")
    running = Client(gateway, key)
    until(lambda: gateway.worker.running == 1)
    kept = Client(gateway, other)
    until(lambda: gateway.worker.running == 2)
    queued = [Client(gateway, key, stream=stream) for stream in (True, False)]
    until(lambda: gateway.service.gateway.in_flight == 4)
    assert gateway.as_admin("DELETE", f"/admin/keys/{id_of(key)}").status == 200
    assert error_of(running.result()) == (200, "invalid_api_key")
    assert b"one" in running.result().body
    assert [error_of(one.result()) for one in queued] == [(401, "invalid_api_key")] * 2
    until(lambda: gateway.worker.running == 1)
    assert kept.answer is None
    assert gateway.service.gateway.in_flight == 1


def test_calls_end_when_another_process_revokes_their_key(gateway: Talking) -> None:
    key = gateway.key("acme")
    running = Client(gateway, key, stream=False)
    until(lambda: gateway.worker.running == 1)
    store = store_of(gateway)
    store.revoke_key(id_of(key), time.time())
    store.close()
    assert error_of(running.result()) == (401, "invalid_api_key")


@pytest.mark.parametrize("ends", ["removed", "disabled"])
def test_calls_end_with_their_tenant(gateway: Talking, ends: str) -> None:
    key = gateway.key("globex")
    running = Client(gateway, key)
    until(lambda: gateway.worker.running == 1)
    store = store_of(gateway)
    if ends == "removed":
        store.remove_tenant("globex", time.time())
    else:
        store.put_tenant(Tenant(name="globex", disabled=True))
    store.close()
    assert error_of(running.result()) == (200, "invalid_api_key")


def test_a_call_outlives_the_rotation_of_its_key_and_ends_with_the_grace(gateway: Talking) -> None:
    key, long = gateway.key("acme"), gateway.key("acme")
    running, kept = Client(gateway, key), Client(gateway, long)
    until(lambda: gateway.worker.running == 2)
    store = store_of(gateway)
    store.rotate_key(id_of(long), time.time(), 3600.0)
    store.rotate_key(id_of(key), time.time(), 1.5)
    assert running.answer is None
    assert error_of(running.result()) == (200, "invalid_api_key")
    assert kept.answer is None
    store.close()


def test_what_was_delivered_to_a_revoked_key_is_charged_and_in_the_ledger(gateway: Talking) -> None:
    gateway.as_admin("PUT", "/admin/tenants/acme", {"day_token_ceiling": 100_000})
    key = gateway.key("acme")
    running = Client(gateway, key)
    until(lambda: gateway.worker.running == 1)
    until(lambda: bool(gateway.service.gate.report("acme")))
    gateway.as_admin("DELETE", f"/admin/keys/{id_of(key)}")
    running.result()
    (line,) = gateway.service.gate.report("acme")
    assert line.spent_tokens > 0
    assert line.leased_tokens == 0
    gateway.stop()
    gateway.join()
    with open_queries(gateway.config.ledger) as ledger:
        (row,) = ledger.jobs()
    assert (row.outcome, row.error_code) == (Outcome.CANCELLED, "invalid_api_key")
    assert row.prompt_tokens + row.output_tokens == line.spent_tokens


def test_a_call_that_shares_the_execution_of_a_revoked_key_continues(tmp_path: Path) -> None:
    with Talking(tmp_path, server={"drain_timeout_s": 0.0}) as gateway:
        key, other = gateway.key("acme"), gateway.key("acme")
        leader = Client(gateway, key, temperature=0)
        until(lambda: gateway.worker.running == 1)
        follower = Client(gateway, other, temperature=0)
        until(lambda: len(gateway.service.gateway._single_flight.readers()) == 2)
        gateway.as_admin("DELETE", f"/admin/keys/{id_of(key)}")
        assert error_of(leader.result()) == (200, "invalid_api_key")
        assert gateway.worker.running == 1
        assert follower.answer is None
        gateway.as_admin("DELETE", f"/admin/keys/{id_of(other)}")
        assert error_of(follower.result()) == (200, "invalid_api_key")
        until(lambda: gateway.worker.running == 0)
