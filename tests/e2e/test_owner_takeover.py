"""Gateways that share workers: one owns them, and another one takes over when it is killed or paused."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.redis_server import RedisServer
from support.serving import free_port, get, post
from support.sharing_gateways import GatewayChild, an_engine
from support.waiting import until

TTL_MS = 1000
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}


@contextmanager
def members(directory: Path, redis: RedisServer, ledger: str, count: int) -> Iterator[list[GatewayChild]]:
    with an_engine() as url, ExitStack() as stack:
        found = []
        for number in range(count):
            listen = f"127.0.0.1:{free_port()}"
            cluster = {"redis": redis.url, "ttl_ms": TTL_MS, "listen": listen, "secret_env": "CLUSTER_SECRET"}
            worker = {"kind": "vllm", "name": "engine", "url": url, "models": ["m"]}
            config = {"ledger": ledger, "cluster": cluster, "workers": [worker]}
            child = GatewayChild(directory / str(number), config)
            stack.callback(child.kill)
            found.append(child)
        for child in found:
            until(child.is_ready, problem=child.log.read_text)
        yield found


def owners(children: list[GatewayChild]) -> list[GatewayChild]:
    return [child for child in children if child.popen.poll() is None and child.metric("inferry_domain_owner") == 1]


def call(child: GatewayChild) -> tuple[int, int]:
    status, _, answer = post(f"http://127.0.0.1:{child.port}", "/v1/chat/completions", CALL)
    return status, answer["usage"]["completion_tokens"] if "usage" in answer else 0


def in_background(child: GatewayChild, count: int) -> tuple[list[threading.Thread], list[tuple[int, int]]]:
    answers: list[tuple[int, int]] = []
    threads = [threading.Thread(target=lambda: answers.append(call(child))) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


def test_calls_of_an_ingress_survive_the_death_of_the_owner(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with members(tmp_path, redis_server, postgres_url, 3) as children:
        (owner,) = owners(children)
        ingress = next(child for child in children if child is not owner)
        epoch = ingress.metric("inferry_domain_epoch")
        threads, answers = in_background(ingress, 4)
        until(lambda: ingress.metric("inferry_open_streams") == 4, problem=ingress.log.read_text)
        owner.stop(signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert answers == [(200, 400)] * 4, "".join(child.log.read_text() for child in children)
        until(lambda: len(owners(children)) == 1)
        assert ingress.metric("inferry_domain_epoch") > epoch


def test_any_gateway_answers_for_the_workers_and_a_drain_survives_its_owner(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    def workers(child: GatewayChild) -> dict[str, bool]:
        status, _, body = get(f"http://127.0.0.1:{child.port}", "/admin/workers")
        return {one["name"]: one["drained"] for one in body["workers"]} if status == 200 else {}

    def advice(child: GatewayChild) -> list[tuple[str, int]]:
        groups = get(f"http://127.0.0.1:{child.port}", "/admin/scale")[2]["groups"]
        return [(one["group"], one["desired"]) for one in groups]

    with members(tmp_path, redis_server, postgres_url, 3) as children:
        (owner,) = owners(children)
        first, second = (child for child in children if child is not owner)
        until(lambda: advice(owner) == [("default", 1)])
        assert advice(first) == advice(second) == [("default", 1)]
        assert post(f"http://127.0.0.1:{first.port}", "/admin/workers/engine/drain", b"")[0] == 200
        assert workers(owner) == workers(first) == workers(second) == {"engine": True}
        until(lambda: not (first.is_ready() or second.is_ready()))  # the owner has told them
        owner.stop(signal.SIGKILL)
        until(lambda: workers(first).get("engine") is True, problem=first.log.read_text)
        readmit = f"http://127.0.0.1:{second.port}", "/admin/workers/engine/readmit", b""
        until(lambda: post(*readmit)[0] == 200, problem=second.log.read_text)  # 503 until it knows the new owner
        until(lambda: call(first) == (200, 400), problem=first.log.read_text)


def test_a_run_ends_at_every_gateway_that_is_asked(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with members(tmp_path, redis_server, postgres_url, 3) as children:
        (owner,) = owners(children)
        first, second = (f"http://127.0.0.1:{child.port}" for child in children if child is not owner)
        post(first, "/v1/chat/completions", CALL | {"max_tokens": 1}, {"x-inferry-run-id": "r"})
        until(lambda: post(second, "/v1/runs/r/finish", b"")[0] == 200)  # once the ledger has its call
        until(lambda: get(f"http://127.0.0.1:{owner.port}", "/v1/runs/r")[2].get("status") == "finished")


def test_a_paused_owner_sends_nothing_when_it_wakes(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with members(tmp_path, redis_server, postgres_url, 2) as children:
        (owner,) = owners(children)
        (other,) = [child for child in children if child is not owner]
        os.kill(owner.popen.pid, signal.SIGSTOP)
        until(lambda: other.metric("inferry_domain_owner") == 1, problem=other.log.read_text)
        os.kill(owner.popen.pid, signal.SIGCONT)
        assert owner.metric("inferry_domain_owner") == 0
        assert call(owner) == (200, 400)
        assert call(other) == (200, 400)
        assert other.metric("inferry_domain_owner") == 1


def respond(child: GatewayChild) -> str:
    """The id of a background response that runs at this gateway, up to its limit of tokens: it ends as incomplete."""
    body = {"model": "m", "input": "hi", "background": True, "max_output_tokens": 2000}
    _, _, answer = post(f"http://127.0.0.1:{child.port}", "/v1/responses", body)
    until(lambda: child.metric("inferry_open_streams") == 1, problem=child.log.read_text)
    return str(answer["id"])


def response_status(child: GatewayChild, id: str) -> str:
    return str(get(f"http://127.0.0.1:{child.port}", f"/v1/responses/{id}")[2]["status"])


def test_background_responses_survive_the_death_of_the_owner_and_of_their_own_gateway(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with members(tmp_path, redis_server, postgres_url, 3) as children:
        (owner,) = owners(children)
        ingress = next(child for child in children if child is not owner)
        id = respond(ingress)
        owner.stop(signal.SIGKILL)
        until(lambda: response_status(ingress, id) == "incomplete", problem=ingress.log.read_text)
        until(lambda: len(owners(children)) == 1)
        (owner,) = owners(children)
        (ingress,) = [child for child in children if child.popen.poll() is None and child is not owner]
        id = respond(ingress)
        ingress.stop(signal.SIGKILL)
        until(lambda: response_status(owner, id) == "incomplete", problem=owner.log.read_text)
