"""Versions in use, judged by what runs came to: a store in memory, a clock that the test moves."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from inferry.dispatch.settings_manager import POLL_INTERVAL_S, SettingsManager
from inferry.domain.errors import Conflict, NotFound
from inferry.domain.run_split import RunSplit
from inferry.domain.settings_versions import (
    ChangeKind,
    Guardrails,
    NewSettings,
    RunTally,
    Sections,
    SettingsChange,
    SettingsState,
    SettingsVersion,
)
from support.virtual_time import run_virtual

SECTIONS: Sections = {
    "lanes": {"P1": {"ttft_ms": 1000, "max_batch": 8}},
    "routes": {"auto": {"default": "a"}},
    "cascades": {},
    "ensembles": {},
    "pipelines": {},
}
RULES = Guardrails(min_runs=10, watch_s=100.0)


class MemoryStore:
    """`runs`: (version, time of arrival and end, attained) of each run."""

    def __init__(self) -> None:
        self.kept: list[SettingsVersion] = []
        self.made: list[SettingsChange] = []
        self.runs: list[tuple[int, float, bool]] = []

    def versions(self) -> list[SettingsVersion]:
        return self.kept[::-1]

    def version(self, number: int) -> SettingsVersion | None:
        return self.kept[number - 1] if number <= len(self.kept) else None

    def changes(self, limit: int) -> list[SettingsChange]:
        return self.made[::-1][:limit]

    def latest_change(self) -> SettingsChange | None:
        return self.made[-1] if self.made else None

    def last_file_change(self) -> SettingsChange | None:
        return next((one for one in self.made[::-1] if one.kind is ChangeKind.FILE), None)

    def add(self, version: SettingsVersion) -> SettingsVersion:
        self.kept.append(msgspec.structs.replace(version, number=len(self.kept) + 1))
        return self.kept[-1]

    def change(self, decide: Callable[[SettingsChange | None], SettingsChange | None]) -> SettingsChange | None:
        change = decide(self.latest_change())
        if change is not None:
            self.made.append(msgspec.structs.replace(change, number=len(self.made) + 1))
            change = self.made[-1]
        return change

    def tallies(self, versions: Sequence[int], since: float, until: float | None) -> list[RunTally]:
        return [
            RunTally(
                version=version,
                run=f"r{number}",
                lane="P1",
                calls=1,
                judged=1,
                attained=int(attained),
                failed=0,
                output_tokens=10,
                seconds=1.0,
                cost_nanos=0,
                gpu_seconds=1.0,
            )
            for number, (version, at, attained) in enumerate(self.runs)
            if version in versions and since <= at and (until is None or at < until)
        ]


class Settings:
    """A manager whose time is `now`. `used` are the numbers of active versions, in order."""

    def __init__(self, store: MemoryStore, rules: Guardrails = RULES) -> None:
        self.store = store
        self.now = 1000.0
        self.used: list[int] = []
        self.manager = SettingsManager(
            store,
            run=self._run,
            wall=lambda: self.now,
            complete=lambda sections: sections,
            prepare=self._prepare,
            models=lambda: ("m",),
            guardrails=rules,
        )

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def _prepare(self, state: SettingsState, split: RunSplit | None) -> Callable[[], None]:
        return lambda: self.used.append(state.active.number)

    def apply(self, **sections: Any) -> None:
        asyncio.run(self.manager.apply(NewSettings(sections=sections)))

    def serve(self, version: int, attained: int, missed: int) -> None:
        self.store.runs += [(version, self.now, number < attained) for number in range(attained + missed)]

    def guard_after(self, seconds: float) -> int:
        """The active version after the guardrails have looked."""
        self.now += seconds
        asyncio.run(self.manager.guard())
        assert self.manager.state is not None
        return self.manager.state.active.number


@pytest.fixture
def settings() -> Settings:
    found = Settings(MemoryStore())
    found.manager.restore(SECTIONS)
    return found


def lanes(**keys: Any) -> dict[str, Any]:
    return {"P1": {**SECTIONS["lanes"]["P1"], **keys}}


def test_a_version_for_models_that_no_worker_serves_now_is_applied_with_force_only(settings: Settings) -> None:
    settings.store.kept[0] = msgspec.structs.replace(settings.store.kept[0], models=("m", "gone", "away"))
    settings.apply(lanes=lanes(max_batch=1))
    changes = len(settings.store.made)
    with pytest.raises(Conflict, match=r"version 1 was made for away, gone, which no worker serves now.*`force`"):
        asyncio.run(settings.manager.apply(NewSettings(version=1)))
    assert (settings.used[-1], len(settings.store.made)) == (2, changes), "nothing was changed"
    asyncio.run(settings.manager.apply(NewSettings(version=1, force=True)))
    assert settings.used[-1] == 1


def test_an_applied_version_that_is_worse_than_the_time_before_is_rolled_back_once(settings: Settings) -> None:
    settings.serve(1, 50, 0)
    settings.now += 10
    settings.apply(lanes=lanes(max_batch=1))
    settings.serve(2, 9, 0)
    assert settings.guard_after(1) == 2, "too few runs"
    settings.serve(2, 0, 41)
    assert settings.guard_after(1) == 1
    assert settings.used == [1, 2, 1]
    assert "attainment of P1 fell from 100.0% to 18.0%" in settings.store.made[-1].reason
    settings.serve(1, 0, 50)
    assert settings.guard_after(1) == 1, "the version before is not judged"


def test_a_second_rollback_goes_further_back_and_the_last_one_is_refused(settings: Settings) -> None:
    settings.apply(lanes=lanes(max_batch=1))
    settings.apply(lanes=lanes(max_batch=2))
    for _ in range(2):
        asyncio.run(settings.manager.rollback())
    assert settings.used == [1, 2, 3, 2, 1]
    with pytest.raises(Conflict, match="active before version 1; versions 2, 3 were rolled back; apply a `version`"):
        asyncio.run(settings.manager.rollback())
    assert settings.used == [1, 2, 3, 2, 1], "nothing was changed"


def test_rows_of_the_time_before_that_are_written_after_the_change_count(settings: Settings) -> None:
    arrived_at = settings.now
    settings.now += 1
    settings.apply(lanes=lanes(max_batch=1))
    settings.serve(2, 0, 50)
    assert settings.guard_after(1) == 2, "no calls of the version before are known yet"
    settings.store.runs += [(1, arrived_at, True)] * 50
    assert settings.guard_after(1) == 1


def test_an_applied_version_that_is_no_worse_stays(settings: Settings) -> None:
    settings.serve(1, 45, 5)
    settings.now += 10
    settings.apply(lanes=lanes(max_batch=1))
    settings.serve(2, 46, 4)
    assert settings.guard_after(1) == 2


def test_an_applied_version_is_judged_for_its_time_and_by_the_same_time_before(settings: Settings) -> None:
    settings.serve(1, 50, 0)
    settings.now += 101
    settings.apply(lanes=lanes(max_batch=1))
    settings.serve(2, 0, 50)
    assert settings.guard_after(1) == 2, "the calls of the version before are too old"
    settings.apply(lanes=lanes(max_batch=2))
    settings.serve(3, 0, 50)
    assert settings.guard_after(100) == 3, "its time is over"


def test_without_a_time_only_trials_are_judged() -> None:
    settings = Settings(MemoryStore(), Guardrails(min_runs=10, watch_s=None))
    settings.manager.restore(SECTIONS)
    settings.serve(1, 50, 0)
    settings.now += 10
    settings.apply(lanes=lanes(max_batch=1))
    settings.serve(2, 0, 50)
    assert settings.guard_after(1) == 2
    with pytest.raises(NotFound):
        asyncio.run(settings.manager.comparison())


def test_attainment_against_other_targets_is_not_compared(settings: Settings) -> None:
    settings.serve(1, 50, 0)
    settings.now += 10
    settings.apply(lanes=lanes(ttft_ms=10))
    settings.serve(2, 0, 50)
    assert settings.guard_after(1) == 2
    compared = asyncio.run(settings.manager.comparison())
    assert [one.name for one in compared.measures] == ["errors", "cost", "throughput"]


def test_versions_that_call_other_models_are_compared_by_the_cost_of_a_run(settings: Settings) -> None:
    settings.serve(1, 50, 0)
    settings.now += 10
    settings.apply(routes={"auto": {"default": "b"}})
    settings.serve(2, 50, 0)
    compared = asyncio.run(settings.manager.comparison())
    cost = next(one for one in compared.measures if one.name == "run_cost")
    assert (cost.active, cost.candidate) == (1.0, 1.0)


def test_a_version_applied_at_one_gateway_is_used_by_another_within_the_interval() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        first, second = Settings(store), Settings(store)
        for one in (first, second):
            one.manager.restore(SECTIONS)
            one.manager.start()
        await first.manager.apply(NewSettings(sections={"lanes": lanes(max_batch=4)}))
        await asyncio.sleep(POLL_INTERVAL_S + 0.01)
        assert second.used == first.used == [1, 2]
        assert second.manager.state is not None
        assert second.manager.state.active.sections["lanes"] == lanes(max_batch=4)
        await second.manager.rollback()
        await asyncio.sleep(POLL_INTERVAL_S + 0.01)
        assert second.used == first.used == [1, 2, 1]
        for one in (first, second):
            await one.manager.close()

    run_virtual(scenario())


def test_of_two_changes_at_two_gateways_the_first_counts_and_the_second_is_told() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        first, second = Settings(store), Settings(store)
        for one in (first, second):
            one.manager.restore(SECTIONS)
        await first.manager.apply(NewSettings(sections={"lanes": lanes(max_batch=4)}))
        with pytest.raises(Conflict, match="at the same time"):
            await second.manager.apply(NewSettings(sections={"lanes": lanes(max_batch=2)}))
        assert second.used == first.used == [1, 2]

    run_virtual(scenario())


def test_a_version_of_fewer_sections_has_the_others_from_the_file_and_stays_in_use() -> None:
    store = MemoryStore()
    old = {"lanes": SECTIONS["lanes"]}
    for sections in (old, {"lanes": lanes(max_batch=3)}):
        store.add(SettingsVersion(number=0, created_at=1.0, models=("m",), note="", sections=sections))
    for kind, active in ((ChangeKind.FILE, 1), (ChangeKind.APPLY, 2)):
        change = SettingsChange(number=0, at=1.0, kind=kind, active=active)
        store.change(lambda latest, change=change: change)  # type: ignore[misc]
    settings = Settings(store)
    settings.manager.restore(SECTIONS)
    state = settings.manager.state
    assert state is not None
    assert (state.active.number, len(store.kept)) == (2, 2)
    assert state.active.sections == {**SECTIONS, "lanes": lanes(max_batch=3)}
