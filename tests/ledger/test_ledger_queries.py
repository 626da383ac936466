"""Sums of the database equal sums in Python."""

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise

import pytest

from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.reports import RunSummary, TenantSummary
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


def a_history(seed: int, jobs: int = 200) -> list[LedgerEntry]:
    dice = random.Random(seed)
    history = []
    for number in range(jobs):
        tenant, run, lane = dice.choice("abc"), f"run-{dice.randrange(6)}", dice.choice(["P0", "P1", "P2"])
        for attempt in range(1, dice.choice([1, 1, 1, 2, 3]) + 1):
            sent = dice.random() < 0.8
            history.append(
                an_entry(
                    number,
                    attempt=attempt,
                    tenant=tenant,
                    run_id=run,
                    step_id=f"step-{dice.randrange(5)}",
                    lane=lane,
                    outcome=dice.choice(list(Outcome)),
                    ended_at=dice.uniform(1_000, 2_000),
                    prompt_tokens=dice.randrange(1000),
                    cached_tokens=dice.randrange(100),
                    output_tokens=dice.randrange(500),
                    gpu_seconds=dice.random() if dice.random() < 0.5 else None,
                    queue_ms=dice.choice([1.0, 2.0, 3.0, dice.random() * 100]) if sent else None,
                    total_ms=100 + dice.random() * 1000,
                    batch_size=dice.randrange(1, 9) if sent else None,
                    cost_nanos=dice.randrange(1000) if dice.random() < 0.5 else None,
                )
            )
    return history


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def tally(rows: Sequence[LedgerEntry]) -> dict[str, int]:
    last: dict[str, LedgerEntry] = {}
    for row in sorted(rows, key=lambda row: row.attempt):
        last[row.job_id] = row
    return {
        "jobs": len(last),
        "attempts": len(rows),
        **{
            name: sum(row.outcome.value in outcomes for row in last.values())
            for name, outcomes in (
                ("done", {"done"}),
                ("failed", {"failed", "preempted"}),
                ("cancelled", {"cancelled"}),
                ("expired", {"expired"}),
            )
        },
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "cached_tokens": sum(row.cached_tokens for row in rows),
        "output_tokens": sum(row.output_tokens for row in rows),
    }


def covered_ms(spans: Sequence[tuple[float, float]]) -> float:
    """Cut at every end of a span, and count the pieces that are in one of them."""
    cuts = sorted({cut for span in spans for cut in span})
    return 1000 * sum(b - a for a, b in pairwise(cuts) if any(start <= a and b <= end for start, end in spans))


def run_by_hand(rows: Sequence[LedgerEntry]) -> RunSummary:
    gpu, waits = known([row.gpu_seconds for row in rows]), known([row.queue_ms for row in rows])
    return RunSummary(
        tenant=rows[0].tenant,
        run_id=rows[0].run_id,
        parent_run=None,
        lanes=tuple(sorted({row.lane for row in rows})),
        steps=len({row.step_id for row in rows}),
        gpu_seconds=sum(gpu) if gpu else None,
        queue_ms_p50=statistics.median(waits) if waits else None,
        queue_ms_mean=statistics.fmean(waits) if waits else None,
        queue_ms_max=max(waits) if waits else None,
        cost_nanos=sum(costs) if (costs := [row.cost_nanos for row in rows if row.cost_nanos is not None]) else None,
        active_ms=covered_ms([(row.ended_at - row.total_ms / 1000, row.ended_at) for row in rows]),
        running_ms=covered_ms(
            [
                (row.ended_at - row.total_ms / 1000 + row.queue_ms / 1000, row.ended_at)
                for row in rows
                if row.queue_ms is not None
            ]
        ),
        started_at=min(row.ended_at - row.total_ms / 1000 for row in rows),
        ended_at=max(row.ended_at for row in rows),
        **tally(rows),
    )


def tenant_by_hand(rows: Sequence[LedgerEntry]) -> TenantSummary:
    gpu, waits = known([row.gpu_seconds for row in rows]), known([row.queue_ms for row in rows])
    sizes = known([row.batch_size for row in rows])
    computed = sum(r.prompt_tokens - r.cached_tokens + r.output_tokens for r in rows if r.gpu_seconds is not None)
    return TenantSummary(
        tenant=rows[0].tenant,
        runs=len({row.run_id for row in rows}),
        gpu_seconds=sum(gpu) if gpu else None,
        tokens_per_gpu_second=computed / sum(gpu) if gpu else None,
        cost_nanos=sum(costs) if (costs := [row.cost_nanos for row in rows if row.cost_nanos is not None]) else None,
        queue_ms_mean=statistics.fmean(waits) if waits else None,
        batch_size_mean=statistics.fmean(sizes) if sizes else None,
        **tally(rows),
    )


def assert_same(found: Sequence[RunSummary | TenantSummary], expected: Sequence[RunSummary | TenantSummary]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for field in one.__struct_fields__:
            value, wanted = getattr(one, field), getattr(other, field)
            assert value == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), field


def by_run(history: Sequence[LedgerEntry]) -> list[RunSummary]:
    groups = defaultdict(list)
    for entry in history:
        groups[entry.tenant, entry.run_id].append(entry)
    return sorted((run_by_hand(rows) for rows in groups.values()), key=lambda run: -run.ended_at)


@pytest.mark.parametrize("seed", range(4))
def test_runs_add_up(ledger: AttemptStore, queries: LedgerQueries, seed: int) -> None:
    history = a_history(seed)
    ledger.append(history)
    expected = by_run(history)
    assert_same(queries.runs(limit=1000), expected)
    assert_same(queries.runs(limit=3), expected[:3])
    assert_same(queries.runs(tenant="a", limit=1000), [run for run in expected if run.tenant == "a"])
    assert_same(
        queries.runs(tenant="a", run="run-2"), by_run([e for e in history if (e.tenant, e.run_id) == ("a", "run-2")])
    )


@pytest.mark.parametrize("seed", range(4))
def test_tenants_add_up(ledger: AttemptStore, queries: LedgerQueries, seed: int) -> None:
    history = a_history(seed)
    ledger.append(history)
    groups = defaultdict(list)
    for entry in history:
        groups[entry.tenant].append(entry)
    by_size = sorted(
        (tenant_by_hand(rows) for rows in groups.values()), key=lambda one: -(one.prompt_tokens + one.output_tokens)
    )
    assert_same(queries.tenants(), by_size)
    assert_same(queries.tenants(tenant="b"), [tenant for tenant in by_size if tenant.tenant == "b"])


def test_the_same_run_id_of_two_tenants_is_two_runs(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(1, tenant="a"), an_entry(2, tenant="b"), an_entry(3, tenant="b")])
    assert {(run.tenant, run.jobs) for run in queries.runs()} == {("a", 1), ("b", 2)}


def test_a_job_that_was_lost_and_then_done_is_done(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(1, outcome=Outcome.FAILED), an_entry(1, attempt=2)])
    (run,) = queries.runs()
    assert (run.jobs, run.attempts, run.done, run.failed) == (1, 2, 1, 0)
    (tenant,) = queries.tenants()
    assert (tenant.jobs, tenant.attempts, tenant.done, tenant.failed) == (1, 2, 1, 0)


def test_unmeasured_values_are_none_and_not_zero(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(1)])
    (run,) = queries.runs()
    assert (run.gpu_seconds, run.queue_ms_p50, run.queue_ms_mean, run.queue_ms_max) == (None, None, None, None)
    (tenant,) = queries.tenants()
    assert (tenant.gpu_seconds, tenant.tokens_per_gpu_second, tenant.batch_size_mean) == (None, None, None)


def test_no_gpu_time_at_all_is_no_rate(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(1, gpu_seconds=0.0, prompt_tokens=10)])
    (tenant,) = queries.tenants()
    assert (tenant.gpu_seconds, tenant.tokens_per_gpu_second) == (0.0, None)


def test_a_run_with_recent_work_is_shown_whole(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(1, ended_at=100.0), an_entry(2, ended_at=200.0), an_entry(3, run_id="old", ended_at=100.0)])
    (run,) = queries.runs(since=150.0)
    assert (run.run_id, run.jobs) == ("run-1", 2)
    (tenant,) = queries.tenants(since=150.0)
    assert (tenant.runs, tenant.jobs) == (1, 1)


def test_jobs_are_listed_newest_first_within_the_filter(ledger: AttemptStore, queries: LedgerQueries) -> None:
    history = [an_entry(n, ended_at=float(n), tenant="ab"[n % 2], run_id=f"run-{n % 3}") for n in range(30)]
    ledger.append(history)
    newest_first = history[::-1]
    assert queries.jobs(limit=5) == newest_first[:5]
    assert queries.jobs(limit=100, tenant="a") == [entry for entry in newest_first if entry.tenant == "a"]
    assert queries.jobs(limit=100, run="run-2") == [entry for entry in newest_first if entry.run_id == "run-2"]
    assert queries.jobs(limit=100, since=20.0) == newest_first[:10]


def test_names_are_values_and_never_sql(ledger: AttemptStore, queries: LedgerQueries) -> None:
    nasty = "'; DROP TABLE attempts; --"
    ledger.append([an_entry(1, tenant=nasty), an_entry(2)])
    assert [run.tenant for run in queries.runs(tenant=nasty)] == [nasty]
    assert len(queries.jobs()) == 2


def test_a_tree_is_a_run_and_all_that_is_below_it(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append(
        [
            an_entry(1, run_id="root", output_tokens=1, cost_nanos=5),
            an_entry(2, run_id="child", parent_run="root", output_tokens=10),
            an_entry(3, run_id="grandchild", parent_run="child", output_tokens=100, cost_nanos=7),
            an_entry(4, run_id="other", parent_run="elsewhere", output_tokens=1000),
            an_entry(5, run_id="child", parent_run="root", tenant="stranger", output_tokens=10_000),
        ]
    )
    tree = queries.tree("acme", "root")
    assert (tree.runs, tree.jobs, tree.output_tokens, tree.cost_nanos) == (3, 3, 111, 12)
    assert queries.sub_runs("acme", "root") == ["child"]
    assert [run.run_id for run in queries.runs(tenant="acme", parent="child")] == ["grandchild"]
    assert queries.has_run("acme", "root")
    assert not queries.has_run("stranger", "root")
    assert queries.tree("acme", "nobody").runs == 0


def test_runs_that_name_each_other_in_a_circle_are_one_tree(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(1, run_id="a", parent_run="b"), an_entry(2, run_id="b", parent_run="a")])
    assert queries.tree("acme", "a").runs == 2


def test_runs_are_paged_by_their_last_end(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(n, run_id=f"run-{n}", ended_at=1000.0 + n) for n in range(5)])
    ledger.append([an_entry("late", run_id="run-1", ended_at=2000.0)])
    assert [run.run_id for run in queries.runs(before=1004.0)] == ["run-3", "run-2", "run-0"]


def test_runs_that_lost_a_job_by_a_cancel_are_known(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(1, error_code="run_cancelled", ended_at=50.0), an_entry(2, run_id="fine")])
    assert queries.cancelled_runs(since=0.0) == [("acme", "run-1")]
    assert queries.cancelled_runs(since=60.0) == []


def test_pages_of_a_timeline_have_every_attempt_of_the_tree_once_in_order(
    ledger: AttemptStore, queries: LedgerQueries
) -> None:
    history = a_history(7)
    ledger.append(history)
    # Several arrive at the same time: job and attempt order them.
    ledger.append([an_entry(n, run_id="top", tenant="a", ended_at=1500.0, total_ms=0.0) for n in range(300, 305)])
    ledger.append([an_entry("sub", run_id="run-1", parent_run="top", tenant="a", decision='{"candidates":1}')])
    found: list[LedgerEntry] = []
    page = queries.timeline("a", "top", limit=7)
    while page.entries and len(found) < len(history):
        found += page.entries
        page = queries.timeline("a", "top", limit=7, after=page.last)
        known = {entry.run_id: 0.0 for entry in found}
        assert page.ended_before.keys() == known.keys()
    expected = [entry for entry in history if (entry.tenant, entry.run_id) == ("a", "run-1")]
    assert len(found) == len(expected) + 6
    assert {(entry.job_id, entry.attempt) for entry in expected} <= {(entry.job_id, entry.attempt) for entry in found}
    assert len({(entry.job_id, entry.attempt) for entry in found}) == len(found)
    arrivals = [entry.ended_at - entry.total_ms / 1000 for entry in found]
    assert arrivals == pytest.approx(sorted(arrivals))
    assert [entry.decision for entry in found if entry.job_id == "sub"] == ['{"candidates":1}']
