"""Calls that wait until the parents of their run are known at this gateway."""

import asyncio

import pytest

from admission.builders import a_caller
from inferry.dispatch.run_lineages import RunLineages
from inferry.domain.callers import Caller
from inferry.domain.clock import SystemClock
from inferry.domain.errors import LedgerUnavailable
from inferry.domain.tenants import Limits
from inferry.runs.registry import RunRegistry
from runs.builders import a_call
from support.virtual_time import run_virtual

LIMITED = a_caller(run_token_ceiling=100)


class FakeLog:
    def __init__(self) -> None:
        self.announced: list[tuple[str, str, str]] = []
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def announce(self, tenant: str, run_id: str, parent_id: str) -> None:
        self.announced.append((tenant, run_id, parent_id))

    def synced(self) -> "asyncio.Future[None]":
        return self.future


def lineages_of(runs: RunRegistry) -> tuple[RunLineages, FakeLog, list[str]]:
    cancelled: list[str] = []
    lineages = RunLineages(runs, SystemClock(), lambda _, run_id: cancelled.append(run_id))
    lineages.log = log = FakeLog()
    return lineages, log, cancelled


def test_a_gateway_of_its_own_waits_for_nothing() -> None:
    assert RunLineages(RunRegistry(), SystemClock(), lambda *_: None).pending(a_call("run", "root"), LIMITED) is None


@pytest.mark.parametrize(
    ("run", "parent", "waits", "announces"),
    [
        ("new", None, True, False),
        ("new", "root", True, True),
        ("new", "new", True, False),
        ("known", None, False, False),
        ("known", "root", True, True),
        ("child", "other", False, False),
        ("forgotten", "root", True, False),
        (None, None, False, False),
        (None, "new", True, False),
        (None, "known", False, False),
    ],
)
def test_the_first_call_of_a_run_waits_and_a_new_parent_is_announced(
    run: str | None, parent: str | None, waits: bool, announces: bool
) -> None:
    async def scenario() -> None:
        runs = RunRegistry()
        runs.admit(a_call("known"), 0.0)
        runs.admit(a_call("child", "known"), 0.0)
        runs.learn_parent("a", "forgotten", "root", 0.0)
        lineages, log, _ = lineages_of(runs)
        assert (lineages.pending(a_call(run, parent), LIMITED) is not None) is waits
        assert log.announced == ([("a", run, parent)] if announces else [])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("caller", "waits"),
    [
        (a_caller(), False),
        (a_caller(day_token_ceiling=100), False),
        (a_caller(run_token_ceiling=100, shadow=True), False),
        (a_caller(run_money_ceiling=1.0), True),
        (a_caller(key=Limits(run_token_ceiling=100)), True),
    ],
)
def test_only_calls_under_a_ceiling_of_runs_wait_and_others_announce_too(caller: Caller, waits: bool) -> None:
    async def scenario() -> None:
        lineages, log, _ = lineages_of(RunRegistry())
        assert (lineages.pending(a_call("run", "root"), caller) is not None) is waits
        assert log.announced == [("a", "run", "root")]

    asyncio.run(scenario())


def test_a_call_goes_on_once_all_links_are_known_and_fails_where_they_are_not_read_in_time() -> None:
    async def scenario() -> None:
        lineages, log, _ = lineages_of(RunRegistry())
        job = a_call("run")
        ready = lineages.pending(job, LIMITED)
        assert ready is not None
        with pytest.raises(LedgerUnavailable):
            await ready()
        log.future.set_result(None)
        assert await ready() is job

    run_virtual(scenario())


def test_a_known_run_ends_when_it_turns_out_to_belong_to_a_cancelled_one() -> None:
    async def scenario() -> None:
        runs = RunRegistry()
        for name in ("doomed", "other"):
            runs.admit(a_call(name), 0.0)
        runs.restore([("a", "root")], 0.0)
        lineages, _, cancelled = lineages_of(runs)
        lineages.learn("a", "doomed", "root")
        lineages.learn("a", "other", "elsewhere")
        assert cancelled == ["doomed"]

    asyncio.run(scenario())
