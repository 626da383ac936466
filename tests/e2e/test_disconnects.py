"""A client that disconnects frees its own resources and no others."""

import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from support.serving import Serving, get, post
from support.waiting import until


def a_stream(gateway: Serving, *, tokens: int, prompt: int = 8, read: int) -> bytes:
    """Open a stream, read `read` bytes of it, and close the connection."""
    body = msgspec.json.encode(
        {"model": "tiny", "prompt": [7] * prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    got = b""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
        sock.sendall(head.encode() + body)
        while len(got) < read:
            part = sock.recv(65536)
            if not part:
                break
            got += part
    return got


def gauges(gateway: Serving) -> dict[str, float]:
    text: str = get(gateway.url, "/metrics")[2]
    names = (
        "inferry_worker_running_sequences",
        "inferry_worker_kv_used_tokens",
        "inferry_open_streams",
        "inferry_jobs_in_flight",
    )
    found: dict[str, float] = {}
    for line in text.splitlines():
        for name in names:
            if line.startswith((name + "{", name + " ")):
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    assert set(found) == set(names), found
    return found


def wait_until_nothing_is_held(gateway: Serving) -> None:
    until(lambda: not any(gauges(gateway).values()), every_s=0.02, problem=lambda: gauges(gateway))


def written(gateway: Serving) -> float:
    """Tokens that the gateway has had from its engine since it began."""
    lines = get(gateway.url, "/metrics")[2].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(r'inferry_tokens_total\{.*"output"', line))


def test_a_disconnect_frees_the_sequence_long_before_its_end(real: Serving) -> None:
    before = written(real)
    a_stream(real, tokens=16_000, read=2000)
    wait_until_nothing_is_held(real)
    assert 0 < written(real) - before < 16_000


def test_a_disconnect_before_the_first_token_frees_it_too(real: Serving) -> None:
    before = written(real)
    a_stream(real, tokens=10_000, prompt=4000, read=0)
    wait_until_nothing_is_held(real)
    assert written(real) - before < 10_000


def test_a_thousand_random_disconnects_leak_nothing_and_disturb_no_other_stream(real: Serving) -> None:
    chance = random.Random(11)
    plans = [
        {"tokens": chance.randint(1, 150), "prompt": chance.randint(1, 150), "read": chance.choice([0, 1, 500, 3000])}
        for _ in range(1000)
    ]
    steady = {"model": "tiny", "prompt": [9] * 20, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    expected = post(real.url, "/v1/completions", steady)[2]["choices"][0]["text"]
    stop = threading.Event()
    answers: list[str] = []

    def keep_asking() -> None:
        while not stop.is_set():
            answers.append(post(real.url, "/v1/completions", steady)[2]["choices"][0]["text"])

    neighbour = threading.Thread(target=keep_asking)
    neighbour.start()
    try:
        with ThreadPoolExecutor(48) as pool:
            list(pool.map(lambda plan: a_stream(real, **plan), plans))
    finally:
        stop.set()
        neighbour.join()
    wait_until_nothing_is_held(real)
    assert answers
    assert set(answers) == {expected}
