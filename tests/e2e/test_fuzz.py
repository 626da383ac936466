"""Broken bytes at the door: every connection is answered or closed in time, nobody is disturbed, nothing stays behind.

FUZZ_CASES asks for more of them than every test run, FUZZ_SEED for others. A case is told by its number alone, but for
the ids of another tenant's objects, which some requests name.
"""

import asyncio
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from inferry.ingress.openapi import document as openapi
from inferry.ingress.openapi.operation import error_kinds
from support import byte_fuzz
from support.pooling_worker import PoolingWorker
from support.request_mutations import Attempt
from support.stored_secrets import WORD, read_secrets, store_secrets
from support.tenant_gateway import ADMIN_KEY, CHAT, TenantGateway, bearer
from support.waiting import async_until

CASES = int(os.environ.get("FUZZ_CASES", "3000"))
SEED = os.environ.get("FUZZ_SEED", "7")
AT_ONCE = 128
PATIENCE_S = 120.0
"""An idle connection is closed after two seconds here; machines may be slow."""
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
THEIRS = {"model": "m", "messages": [{"role": "user", "content": f"the plans for {WORD}"}]}

STATUSES = {kind.status for kind in error_kinds() if kind.status < 500} | {100, 200, 201, 202, 431, 501, 505, 529}
OUT = {
    *openapi.document()["components"]["headers"],
    *("content-type", "content-length", "transfer-encoding", "connection", "cache-control", "allow", "location"),
}
HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z' -]+\r\n((?:[a-z0-9-]+: [\x20-\x7e]*\r\n)*)\r\n")


class Wrong(AssertionError):
    """Says which case it was, and what was sent."""


def check(answer: bytes, *, is_head: bool) -> Counter[int]:
    """Read everything that came back as HTTP; the statuses in it. The last answer may be cut off, by a reset."""
    assert WORD.encode() not in answer, "another tenant's"
    found: Counter[int] = Counter()
    rest = answer
    while rest:
        head = HEAD.match(rest)
        assert head is not None, f"not HTTP: {rest[:200]!r}"
        status = int(head[1])
        assert status in STATUSES, f"status {status}: {rest[:400]!r}"
        found[status] += 1
        rest = rest[head.end() :]
        lines = [line.partition(b": ") for line in head[2].split(b"\r\n") if line]
        headers = {name.decode(): value for name, _, value in lines}
        assert set(headers) <= OUT, f"headers {set(headers) - OUT}"
        assert len(headers) == len(lines), "a header comes twice"
        if status == 100:
            continue
        if "transfer-encoding" in headers:
            rest = rest.partition(b"0\r\n\r\n")[2]
            continue
        size = int(headers.get("content-length", "-1"))
        if size < 0:  # HTTP/1.0: until the end of the connection
            return found
        if is_head and (not rest or rest.startswith(b"HTTP/1.1 ")):
            continue
        body, rest = rest[:size], rest[size:]
        if status >= 400 and len(body) == size:
            detail = json.loads(body)["error"]
            # OpenAI's shape, or Anthropic's.
            assert set(detail) in ({"message", "type", "param", "code"}, {"message", "type"})
    return found


async def send(port: int, data: bytes, rng: Random) -> bytes:
    """Send it, in one piece or several, and read until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        pieces = [data]
        if rng.random() < 0.15 and data:
            size = max(1, len(data) // rng.randint(2, 40))
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0.001)
        if rng.random() < 0.3:
            writer.write_eof()
        if rng.random() < 0.05:
            return b""  # left without waiting
        return await reader.read(-1)
    except OSError:  # the server has closed already; ENOTCONN is no ConnectionError
        return b""
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            pass


async def fuzz(port: int, key: str, cases: range, attempts: Sequence[Attempt]) -> Counter[int]:
    statuses: Counter[int] = Counter()
    numbers = iter(cases)

    async def client() -> None:
        for number in numbers:
            rng = Random(f"{SEED}-{number}")
            data = byte_fuzz.generate(rng, key, ADMIN_KEY, attempts)
            try:
                answer = await asyncio.wait_for(send(port, data, rng), PATIENCE_S)
                statuses.update(check(answer, is_head=b"HEAD " in data))
            except (AssertionError, ValueError, TimeoutError) as error:
                raise Wrong(f"seed {SEED}, case {number}: {error!r} after {data[:600]!r}") from error

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return statuses


@pytest.mark.timeout(900 + CASES // 10)
def test_malformed_bytes_affect_no_other_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    server = {"body_timeout_s": 2.0, "idle_timeout_s": 2.0, "max_body_bytes": 100_000}
    tenants = {"acme": {"run_token_ceiling": 10**12, "day_token_ceiling": 10**12, "max_concurrent": 10_000}}
    config = {"server": server, "tenants": tenants}
    with TenantGateway(tmp_path, lambda: ([PoolingWorker()], {}), config) as gateway:
        key, other = gateway.key("acme"), gateway.key("globex")
        theirs = bearer(other, x_inferry_run_id="theirs", x_inferry_step_id=WORD, x_inferry_parent_run_id=WORD)
        for call, headers in ((THEIRS, theirs), (CALL, bearer(key, x_inferry_run_id="mine"))):
            assert gateway.call("POST", CHAT, call, headers).status == 200
        ids = store_secrets(gateway, other)
        secrets = read_secrets(gateway, other, ids)
        for method, path, body in ids.attempts():
            answer = gateway.call(method, path, body, bearer(key))
            assert answer.status in (200, 400, 404), (path, answer.body)
            assert WORD.encode() not in answer.body, path
        statuses = asyncio.run(fuzz(gateway.port, key, range(CASES), ids.attempts()))
        # It went deeper than the parser: some were served, and refused for reasons of many kinds.
        assert {200, 400, 401, 403, 404, 405, 413} <= set(statuses), statuses

        assert read_secrets(gateway, other, ids) == secrets
        gateway.run(async_until(lambda: not gateway.service.gateway.in_flight))
        for name in ("inferry_open_streams", "inferry_jobs_in_flight", "inferry_queue_depth"):
            assert gateway.metric(name) == 0, name
        assert all(line.leased_tokens == 0 for line in gateway.service.gate.report("acme"))
        assert gateway.call("GET", "/v1/runs/theirs", headers=bearer(other)).json["status"] == "idle"
        assert gateway.call("POST", CHAT, CALL, bearer(other)).status == 200
    assert [record.getMessage() for record in caplog.records] == []
