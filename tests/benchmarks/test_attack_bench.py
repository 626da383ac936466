"""The attacks of `make bench BENCH=attack`, a few of each: every attacker gets its answer."""

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest

from benchmarks.attackers import ATTACKS, attack
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.request import Request
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import TenantGateway

ANSWERS = {
    "trailers_1MB": {"401"},
    "trailers_10MB": {"401"},
    "chunk_extensions": {"401"},
    "heads": {"431"},
    "large_fields": {"401"},
    "half_open_bodies": {"closed", "400"},
    "large_bodies": {"401"},
    "pipelines": {"401"},
}
PER_STRIKE = {"pipelines": 1001}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantGateway]:
    with TenantGateway(tmp_path_factory.mktemp("attacked"), lambda: ([ScriptedWorker()], {}), {}) as running:
        running.key("acme")
        yield running


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind in ANSWERS])
def test_attacks_get_well_formed_errors(gateway: TenantGateway, kind: str) -> None:
    said = asyncio.run(attack(gateway.port, kind, 5, 0.0))
    answers = said["answers"]
    assert isinstance(answers, dict)
    assert set(answers) <= ANSWERS[kind], said
    assert sum(answers.values()) == 5 * PER_STRIKE.get(kind, 1)


def still_there() -> int:
    """Connections and requests that somebody, or a cycle of references, still holds."""
    return sum(type(one) in (Connection, Request) for one in gc.get_objects())


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind in ANSWERS])
def test_refused_attacks_leave_no_garbage_cycles(gateway: TenantGateway, kind: str) -> None:
    """Cycles would hold what has been read until the collector comes, and in a server it comes seldom."""
    gc.collect()
    before = still_there()  # other gateways of this process keep theirs
    gc.disable()
    try:
        asyncio.run(attack(gateway.port, kind, 20, 0.0))
        end = time.monotonic() + 120.0
        while still_there() > before + 2 and time.monotonic() < end:  # the last one of all may be kept for the next
            time.sleep(0.05)
        assert still_there() <= before + 2
    finally:
        gc.enable()
