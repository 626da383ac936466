"""Gateways that share workers: one owns them, and another one takes over when it is killed or paused."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.redis_server import RedisServer
from support.serving import free_port, post
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
