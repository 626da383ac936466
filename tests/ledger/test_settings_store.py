"""Versions and changes of the settings in a database, and what runs came to with each."""

from collections.abc import Iterator

import pytest

from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.run_split import RunSplit
from inferry.domain.settings_versions import ChangeKind, SettingsChange, SettingsVersion
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.opening import open_queries
from inferry.ledger.stores.settings import SettingsStore


@pytest.fixture
def store(ledger_url: str) -> Iterator[SettingsStore]:
    database = LedgerDatabase(ledger_url)
    yield SettingsStore(database)
    database.close()


def a_version(batch: int) -> SettingsVersion:
    sections = {"lanes": {"P1": {"max_batch": batch}}}
    return SettingsVersion(number=0, created_at=1.0, models=("m",), note="why", sections=sections)


def a_change(kind: ChangeKind, active: int, candidate: int | None = None) -> SettingsChange:
    split = None if candidate is None else RunSplit("salt", 0.25)
    return SettingsChange(number=0, at=2.0, kind=kind, active=active, candidate=candidate, split=split)


def an_entry(number: int, version: int | None, **fields: object) -> LedgerEntry:
    values: dict[str, object] = {"run_id": f"r{number}", "outcome": Outcome.DONE, "ended_at": 100.0, **fields}
    return LedgerEntry(
        job_id=f"j{number}",
        attempt=1,
        tenant="t",
        step_id="s",
        model="m",
        lane="P1",
        prompt_tokens=10,
        output_tokens=7,
        total_ms=2000.0,
        first_token_ms=50.0,
        queue_ms=1.0,
        settings_version=version,
        **values,  # type: ignore[arg-type]
    )


def test_versions_and_changes_are_numbered_and_read_back(store: SettingsStore, ledger_url: str) -> None:
    assert (store.latest_change(), store.versions(), store.last_file_change()) == (None, [], None)
    first, second = store.add(a_version(1)), store.add(a_version(2))
    assert [one.number for one in store.versions()] == [2, 1]
    assert store.version(1) == first
    assert store.version(3) is None
    store.change(lambda latest: a_change(ChangeKind.FILE, 1))
    trial = store.change(lambda latest: a_change(ChangeKind.TRIAL, 1, second.number))
    assert trial is not None
    assert (trial.number, store.latest_change()) == (2, trial)
    assert [change.kind for change in store.changes(5)] == [ChangeKind.TRIAL, ChangeKind.FILE]
    file = store.last_file_change()
    assert file is not None
    assert file.number == 1
    with open_queries(ledger_url) as queries:
        assert queries.active_settings() == first


def test_a_change_that_does_not_follow_the_latest_is_not_stored(store: SettingsStore) -> None:
    store.add(a_version(1))
    store.change(lambda latest: a_change(ChangeKind.FILE, 1) if latest is None else None)
    assert store.change(lambda latest: a_change(ChangeKind.APPLY, 1) if latest is None else None) is None
    assert len(store.changes(5)) == 1


def test_runs_are_summed_by_version_from_the_begin_of_the_trial(store: SettingsStore, ledger_url: str) -> None:
    ledger = AttemptStore(ledger_url)
    ledger.append(
        [
            an_entry(1, 1, attained=True, cost_nanos=5),
            an_entry(2, 2, attained=False, run_id="x"),
            an_entry(3, 2, attained=True, run_id="x"),
            an_entry(4, 2, outcome=Outcome.FAILED),
            an_entry(5, 2, outcome=Outcome.CANCELLED),
            an_entry(6, 2, shared_with="j2"),
            an_entry(7, 3, attained=True),
            an_entry(8, 2, attained=True, ended_at=51.0),
        ]
    )
    ledger.close()
    found = sorted(store.tallies((1, 2), 50.0, None), key=lambda one: (one.version, one.run))
    assert [(one.version, one.calls, one.judged, one.attained, one.failed) for one in found] == [
        (1, 1, 1, 1, 0),
        (2, 1, 0, 0, 1),
        (2, 2, 2, 1, 0),
    ]
    assert (found[0].cost_nanos, found[0].output_tokens, found[0].seconds) == (5, 7, 2.0)
    assert store.tallies((1, 2), 50.0, 100.0) == []


def test_a_call_that_did_not_complete_is_missed_if_it_was_late_and_not_judged_otherwise(
    store: SettingsStore, ledger_url: str
) -> None:
    ledger = AttemptStore(ledger_url)
    ended = [Outcome.CANCELLED, Outcome.FAILED, Outcome.EXPIRED]
    ledger.append(
        [
            an_entry(number, 2, outcome=outcome, attained=attained, run_id=f"{outcome.value} {attained}")
            for number, (outcome, attained) in enumerate((one, two) for one in ended for two in (True, False))
        ]
    )
    ledger.close()
    found = {tuple(one.run.split("\0")[1].split()): one for one in store.tallies((2,), 50.0, None)}
    assert {name: (one.judged, one.attained, one.failed) for name, one in found.items()} == {
        ("cancelled", "False"): (1, 0, 0),
        ("failed", "True"): (0, 0, 1),
        ("failed", "False"): (1, 0, 1),
        ("expired", "True"): (0, 0, 1),
        ("expired", "False"): (1, 0, 1),
    }


def test_calls_for_a_replay_have_times_and_tokens_and_come_in_order(store: SettingsStore, ledger_url: str) -> None:
    ledger = AttemptStore(ledger_url)
    ledger.append(
        [an_entry(1, 1, ended_at=20.0), an_entry(2, 1, ended_at=10.0), an_entry(3, 1, outcome=Outcome.FAILED)]
    )
    ledger.close()
    with open_queries(ledger_url) as queries:
        calls = queries.calls(0.0, 1000.0)
    assert [(call.arrived_at, call.run_id, call.prompt_tokens, call.output_tokens) for call in calls] == [
        (8.0, "r2", 10, 7),
        (18.0, "r1", 10, 7),
    ]
