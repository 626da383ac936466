"""Where the time of recent calls went."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from inferry.domain.ledger import Outcome
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from ledger.builders import an_entry


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[AttemptStore]:
    with closing(AttemptStore(ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def queries(ledger_url: str, ledger: AttemptStore) -> Iterator[LedgerQueries]:
    with open_queries(ledger_url) as queries:
        yield queries


def test_an_empty_ledger_has_no_traffic(queries: LedgerQueries) -> None:
    found = queries.traffic(0.0, 1e9)
    assert (found.attempts, found.runs, found.lanes, found.workers, found.tenants) == (0, 0, (), (), ())


def test_the_time_of_a_call_is_split_into_its_stages(ledger: AttemptStore, queries: LedgerQueries) -> None:
    of = {"worker": "w", "queue_ms": 100.0, "batching_ms": 40.0, "first_token_ms": 300.0, "total_ms": 1300.0}
    of |= {"prompt_tokens": 100, "cached_tokens": 25, "output_tokens": 11, "template_id": "t"}
    # A run of five calls with two seconds between them, and one that came back after an hour.
    ledger.append([an_entry(number, ended_at=1000 + 3.3 * number, **of) for number in range(5)])
    ledger.append([an_entry(9, ended_at=5000.0, **of)])
    ledger.append([an_entry(10, run_id="x", ended_at=1000.0, outcome=Outcome.CANCELLED, total_ms=50.0, lane="P0")])
    ledger.append([an_entry(11, run_id="x", ended_at=1000.0, shared_with="job-1", lane="P2")])
    found = queries.traffic(900.0, 6000.0)
    assert (found.attempts, found.runs) == (7, 2)
    by_lane = {lane.lane: lane for lane in found.lanes}
    assert set(by_lane) == {"P0", "P1"}
    one = by_lane["P1"]
    assert (one.queue_ms, one.batching_ms, one.prefill_ms, one.decode_ms) == (60.0, 40.0, 200.0, 1000.0)
    assert one.tool_ms == pytest.approx(2000.0)
    assert one.tool_calls == 4
    assert one.worker_s == pytest.approx(6 * 1.2)
    assert (one.top_tenant, one.top_tenant_share) == ("acme", 1.0)
    assert (one.cached_ratio, one.templated_ratio, one.prompt_tokens_sd) == (0.25, 1.0, 0.0)
    assert (by_lane["P0"].cancelled, by_lane["P0"].queue_ms, by_lane["P0"].tool_calls) == (1, None, 0)
    (worker,) = found.workers
    assert (worker.worker, worker.attempts, worker.computed_prompt_tokens) == ("w", 6, 450)
    assert (worker.prefill_ms, worker.itl_ms) == (200.0, 100.0)
    (tenant,) = found.tenants
    assert (tenant.tenant, tenant.tokens, tenant.cost) == ("acme", 666, None)


def test_a_lane_names_the_tenant_with_most_of_its_time_on_workers(ledger: AttemptStore, queries: LedgerQueries) -> None:
    for number, (tenant, lane, total_ms) in enumerate(
        [("a", "P2", 1100.0), ("b", "P2", 2100.0), ("b", "P2", 1100.0), ("a", "P1", 9100.0)]
    ):
        ledger.append(
            [an_entry(number, tenant=tenant, lane=lane, worker="w", queue_ms=100.0, total_ms=total_ms, ended_at=10.0)]
        )
    found = {lane.lane: (lane.top_tenant, lane.top_tenant_share) for lane in queries.traffic(0.0, 20.0).lanes}
    assert found == {"P1": ("a", 1.0), "P2": ("b", pytest.approx(0.75))}
