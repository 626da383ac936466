"""The settings in use: restored from the database, changed by operators, rolled back by guardrails.

`SettingsManager` belongs to the event loop and owns the current state. Every change is written to the database first
and then used. Other gateways with the same database follow within `POLL_INTERVAL_S`.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from inferry.dispatch.periodic_task import PeriodicTask
from inferry.domain.errors import Conflict, InvalidRequest, LedgerUnavailable, NotFound
from inferry.domain.run_split import RunSplit
from inferry.domain.settings_versions import (
    ChangeKind,
    Guardrails,
    NewSettings,
    RunTally,
    Sections,
    SettingsChange,
    SettingsComparison,
    SettingsHistory,
    SettingsState,
    SettingsVersion,
)
from inferry.settings.comparison import ATTAINMENT, compare
from inferry.settings.former import former_version
from inferry.settings.guardrails import breach_reason, interval_error, rollback_reason
from inferry.settings.sections import calls_other_models, differences, retargeted, whole_only

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
ROWS_WRITTEN_AFTER_S = 10.0
"""Seconds after which the row of an ended call is in the database."""
MAX_CHANGES = 200
"""Changes in a listing, and how far back the version before the active one is looked for."""


_Prepared = tuple[SettingsChange, SettingsState, Callable[[], None]]


class SettingsStore(Protocol):
    """Versions and changes in the database. Methods block."""

    def versions(self) -> list[SettingsVersion]: ...
    def version(self, number: int) -> SettingsVersion | None: ...
    def changes(self, limit: int) -> list[SettingsChange]: ...
    def latest_change(self) -> SettingsChange | None: ...
    def last_file_change(self) -> SettingsChange | None: ...
    def add(self, version: SettingsVersion) -> SettingsVersion: ...
    def change(self, decide: Callable[[SettingsChange | None], SettingsChange | None]) -> SettingsChange | None: ...
    def tallies(self, versions: Sequence[int], since: float, until: float | None) -> list[RunTally]: ...


class SettingsManager:
    """`complete` checks sections and fills in defaults, or raises InvalidRequest. `prepare` makes what a state needs,
    and returns the function that puts it in use; both block. `models` are those served now. `run` runs a blocking
    function off the event loop. Without `can_try` no trial is started, and nothing is rolled back by itself.
    """

    def __init__(
        self,
        store: SettingsStore,
        *,
        run: Callable[..., Awaitable[Any]],
        wall: Callable[[], float],
        complete: Callable[[Sections], Sections],
        prepare: Callable[[SettingsState, RunSplit | None], Callable[[], None]],
        models: Callable[[], Iterable[str]],
        guardrails: Guardrails,
        can_try: bool = True,
    ) -> None:
        self._store = store
        self._run = run
        self._wall = wall
        self._complete = complete
        self._prepare = prepare
        self._models = models
        self._guardrails = guardrails
        self._can_try = can_try
        self._file_sections: Sections = {}
        self._change: SettingsChange | None = None
        self._before: tuple[int, list[RunTally]] | None = None
        self.state: SettingsState | None = None
        self._following = PeriodicTask(self._follow_while_up, POLL_INTERVAL_S, "the settings")
        self._guarding = PeriodicTask(
            self._guard_while_up, guardrails.check_interval_s, "the guardrails of the settings"
        )

    def restore(self, file_sections: Sections) -> None:
        """Use what was in use last, or a new version if the configuration file has changed since. Blocks."""
        sections = self._file_sections = self._complete(file_sections)
        self._store_file(sections)
        try:
            self._load(self._read_if_new())
        except Exception as error:
            # They do not fit the rest of the file, for example a group of workers that it no longer has.
            log.error("the settings in use last cannot be used, those of the file are: %s", error)
            self._store_version(sections)
            self._load(self._read_if_new())

    def _store_file(self, sections: Sections) -> None:
        last = self._store.last_file_change()
        before = None if last is None else self._version(last.active)
        if before is not None and not differences(before.sections, sections):
            return
        self._store_version(sections)

    def _store_version(self, sections: Sections) -> None:
        version = self._store.add(self._new_version(sections, "configuration file"))
        change = SettingsChange(number=0, at=self._wall(), kind=ChangeKind.FILE, active=version.number)
        self._store.change(lambda latest: change)

    def start(self) -> None:
        self._following.start()
        self._guarding.start()

    async def close(self) -> None:
        await self._following.close()
        await self._guarding.close()

    # -- operators -----------------------------------------------------------------------------------------------------

    async def history(self) -> SettingsHistory:
        versions, changes = await self._run(self._versions), await self._run(self._store.changes, MAX_CHANGES)
        state = self._current()
        return SettingsHistory(
            active=state.active.number,
            candidate=None if state.candidate is None else state.candidate.number,
            versions=tuple(versions),
            changes=tuple(changes),
        )

    async def apply(self, new: NewSettings) -> SettingsState:
        """Use other settings: for all runs, or for a share of them. Raises InvalidRequest, NotFound and Conflict."""
        state = self._current()
        split = None if new.share is None or new.share == 1 else RunSplit(secrets.token_hex(8), new.share)
        if split is not None and not 0 < split.share < 1:
            raise InvalidRequest("`share` is above 0 and at most 1", param="share")
        if split is not None and not self._can_try:
            raise InvalidRequest("a trial needs a ledger that is not in memory: versions are compared by its rows")
        version = await self._find_or_add(new, state, split)
        active, kind = (version.number, ChangeKind.APPLY) if split is None else (state.active.number, ChangeKind.TRIAL)
        await self._write(
            SettingsChange(
                number=0,
                at=self._wall(),
                kind=kind,
                active=active,
                candidate=None if split is None else version.number,
                split=split,
                reason=new.note,
            )
        )
        return self._current()

    async def rollback(self, reason: str = "") -> SettingsState:
        """End the trial, or make the version that was active before the active one again. A version that was rolled
        back is skipped. Raises Conflict where no other is left.
        """
        state = self._current()
        active = state.active.number
        if state.candidate is None:
            changes: list[SettingsChange] = await self._run(self._store.changes, MAX_CHANGES)
            former = former_version(changes)
            if former is None:
                raise Conflict(_no_former(changes, active))
            active = former
        await self._write(
            SettingsChange(number=0, at=self._wall(), kind=ChangeKind.ROLLBACK, active=active, reason=reason)
        )
        return self._current()

    async def comparison(self) -> SettingsComparison:
        """The latest trial, or the latest version applied to all runs, whether it is over or not. Raises NotFound."""
        changes: list[SettingsChange] = await self._run(self._store.changes, MAX_CHANGES)
        for place, change in enumerate(changes):
            ends = [changes[place - 1].at] if place else []
            if not _is_trial(change):
                ends += [end for end in (change.at + (self._guardrails.watch_s or 0.0),) if end <= self._wall()]
            found = await self._compare(change, min(ends, default=None))
            if found is not None:
                return found
        raise NotFound("no version was tried or applied yet")

    # -- by itself -----------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Use what another gateway has changed."""
        self._load(await self._run(self._read_if_new))

    async def guard(self) -> None:
        """Roll back a trial, or a version that was applied, if it breaches a limit."""
        change, rules = self._change, self._guardrails
        if change is None or not self._is_guarded(change):
            return
        comparison = await self._compare(change, None)
        if comparison is None:
            return
        now = self._wall()
        if _is_trial(change):
            reason = rollback_reason(comparison.measures, rules, change.at, now)
        else:
            reason = breach_reason(comparison.measures, rules)
        if reason is None or self._change is not change:
            return
        log.warning("version %d of the settings is rolled back: %s", comparison.candidate, reason)
        await self._write(
            SettingsChange(number=0, at=now, kind=ChangeKind.ROLLBACK, active=comparison.active, reason=reason)
        )

    def _is_guarded(self, change: SettingsChange) -> bool:
        watch_s = self._guardrails.watch_s
        is_watched = change.kind is ChangeKind.APPLY and self._can_try and watch_s is not None
        return _is_trial(change) or (is_watched and self._wall() < change.at + (watch_s or 0.0))

    async def _follow_while_up(self) -> None:
        with suppress(LedgerUnavailable):  # the tenants' watcher logs it
            await self.follow()

    async def _guard_while_up(self) -> None:
        with suppress(LedgerUnavailable, Conflict):  # another gateway may have rolled back first
            await self.guard()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _current(self) -> SettingsState:
        if self.state is None:
            raise Conflict("the settings were not restored yet")
        return self.state

    async def _find_or_add(self, new: NewSettings, state: SettingsState, split: RunSplit | None) -> SettingsVersion:
        """The version to use, checked against the active one."""
        if (new.sections is None) == (new.version is None):
            raise InvalidRequest("name either `sections` or a `version`")
        version: SettingsVersion | None
        if new.version is not None:
            version = await self._run(self._version, new.version)
            if version is None:
                raise NotFound(f"there is no version {new.version} of the settings")
            missing = sorted(set(version.models).difference(self._models()))
            if missing and not new.force:
                raise Conflict(
                    f"version {version.number} was made for {', '.join(missing)}, which no worker serves now; "
                    "apply it with `force` to use it all the same"
                )
        else:
            sections = await self._run(self._complete, {**state.active.sections, **(new.sections or {})})
            known: list[SettingsVersion] = await self._run(self._versions)
            version = next((one for one in known if not differences(one.sections, sections)), None)
            if version is None:
                version = self._new_version(sections, new.note)
        changed = differences(state.active.sections, version.sections)
        if not changed and state.candidate is None:
            raise Conflict(f"version {state.active.number}, which is active, has the same settings")
        if split is not None and not changed:
            raise InvalidRequest("a trial needs settings that differ from the active ones", param="share")
        whole = [] if split is None else whole_only(changed)
        if whole:
            names = ", ".join(one.name for one in whole)
            raise InvalidRequest(
                f"cannot differ between runs: {names}; the value belongs to the lane or to a worker as a whole. Apply "
                "the settings without a share",
                param="share",
            )
        if version.number == 0:
            version = await self._run(self._store.add, version)
        return version

    def _new_version(self, sections: Sections, note: str) -> SettingsVersion:
        models = tuple(sorted(self._models()))
        return SettingsVersion(number=0, created_at=self._wall(), models=models, note=note, sections=sections)

    async def _write(self, change: SettingsChange) -> None:
        """Store a change that follows the current one, and use it. Raises Conflict if another came first."""
        expected = self._change
        stored: SettingsChange | None = await self._run(
            self._store.change, lambda latest: change if _number(latest) == _number(expected) else None
        )
        await self.follow()
        if stored is None:
            raise Conflict("the settings were changed at the same time")

    async def _compare(self, change: SettingsChange, until: float | None) -> SettingsComparison | None:
        """The two versions of a trial, or an applied version and the one before it; None for other changes."""
        versions: tuple[SettingsVersion, SettingsVersion] | None = await self._run(self._compared, change)
        if versions is None:
            return None
        former, tried = versions
        changed = differences(former.sections, tried.sections)
        tallies: list[RunTally] = await self._run(self._tallies, change, former.number, tried.number, until)
        error, per_run = interval_error(self._guardrails), calls_other_models(changed)
        measures = compare(tallies, former.number, tried.number, error, per_run=per_run)
        lanes = retargeted(changed)
        return SettingsComparison(
            kind=change.kind,
            active=former.number,
            candidate=tried.number,
            since=change.at,
            until=until,
            confidence=1 - self._guardrails.false_alarm,
            measures=tuple(one for one in measures if one.name != ATTAINMENT or one.lane not in lanes),
        )

    def _compared(self, change: SettingsChange) -> tuple[SettingsVersion, SettingsVersion] | None:
        """The version to go back to, and the one that is judged. Blocks."""
        numbers: tuple[int | None, int | None] = (change.active, change.candidate)
        if not _is_trial(change):
            if change.kind is not ChangeKind.APPLY or self._guardrails.watch_s is None:
                return None
            earlier = (one.active for one in self._store.changes(MAX_CHANGES) if one.number < change.number)
            numbers = (next(earlier, None), change.active)
        former, tried = (None if number is None else self._version(number) for number in numbers)
        if former is None or tried is None or former.number == tried.number:
            return None
        return former, tried

    def _tallies(self, change: SettingsChange, former: int, tried: int, until: float | None) -> list[RunTally]:
        """The runs of a trial, or of the time before an applied version and of the time since. Blocks."""
        if _is_trial(change):
            return self._store.tallies((former, tried), change.at, until)
        if self._before is not None and self._before[0] == change.number:
            before = self._before[1]
        else:
            before = self._store.tallies((former,), change.at - (self._guardrails.watch_s or 0.0), change.at)
            if self._wall() >= change.at + ROWS_WRITTEN_AFTER_S:
                self._before = change.number, before  # it does not change any more, and may have many rows
        return [*before, *self._store.tallies((tried,), change.at, until)]

    def _version(self, number: int) -> SettingsVersion | None:
        version = self._store.version(number)
        return None if version is None else self._filled(version)

    def _versions(self) -> list[SettingsVersion]:
        return [self._filled(version) for version in self._store.versions()]

    def _filled(self, version: SettingsVersion) -> SettingsVersion:
        """A version of a release that had fewer sections with versions: the file has the others."""
        return msgspec.structs.replace(version, sections={**self._file_sections, **version.sections})

    def _read_if_new(self) -> _Prepared | None:
        """The latest change, the state after it and what puts it in use; None where it is in use. Blocks."""
        change = self._store.latest_change()
        if change is None or change.number == _number(self._change):
            return None
        active = self._version(change.active)
        assert active is not None
        candidate = None if change.candidate is None else self._version(change.candidate)
        share = None if change.split is None else change.split.share
        state = SettingsState(active=active, candidate=candidate, share=share, since=change.at)
        return change, state, self._prepare(state, change.split)

    def _load(self, found: _Prepared | None) -> None:
        if found is None or found[0].number == _number(self._change):
            return
        self._change, self.state, use = found
        use()
        candidate, share = self.state.candidate, self.state.share
        tried = "" if candidate is None else f", version {candidate.number} for {share or 0:.0%} of the runs"
        log.info("settings: version %d%s", self.state.active.number, tried)


def _number(change: SettingsChange | None) -> int:
    return 0 if change is None else change.number


def _no_former(changes: Sequence[SettingsChange], active: int) -> str:
    others = sorted({change.active for change in changes} - {active})
    if not others:
        return "no other version was active before"
    names = f"version {others[0]} was" if len(others) == 1 else f"versions {', '.join(map(str, others))} were"
    return f"no other version was active before version {active}; {names} rolled back; apply a `version` by its number"


def _is_trial(change: SettingsChange) -> bool:
    return change.candidate is not None
