"""Numbered versions of the settings, and what happened to them."""

import enum
from typing import Any

from msgspec import Struct

from inferry.domain.run_split import RunSplit

Sections = dict[str, Any]
"""Sections of the configuration by name, complete with defaults."""


class SettingsVersion(Struct, frozen=True, kw_only=True):
    """Settings under a number. Never changed. `models` are those that the gateway served when it was made."""

    number: int
    created_at: float
    models: tuple[str, ...]
    note: str
    sections: Sections


class ChangeKind(enum.Enum):
    FILE = "file"
    """The gateway read a configuration file whose settings had changed."""
    APPLY = "apply"
    TRIAL = "trial"
    """Some runs got the version; the others kept the active one."""
    ROLLBACK = "rollback"
    """A trial ended, or the version before became the active one again."""


class SettingsChange(Struct, frozen=True, kw_only=True):
    """One change. After it `active` is in use, and `candidate` for the runs of `split`. `reason` is for operators."""

    number: int
    at: float
    kind: ChangeKind
    active: int
    candidate: int | None = None
    split: RunSplit | None = None
    reason: str = ""


class RunTally(Struct, frozen=True, kw_only=True):
    """What the calls of one run in one lane came to, with one version. `run` is unique over tenants. `judged` calls
    have a target; `failed` calls ended with an error of the gateway or a worker, or expired. `seconds` are from
    arrival to end.
    """

    version: int
    run: str
    lane: str
    calls: int
    judged: int
    attained: int
    failed: int
    output_tokens: int
    seconds: float
    cost_nanos: int
    gpu_seconds: float


class Measure(Struct, frozen=True, kw_only=True):
    """One measure of both versions. `lane` is None for all lanes together. `difference`, between `low` and `high`, is
    candidate - active for attainment and errors, and candidate / active - 1 for cost and throughput. `cost` is money
    per 1,000 output tokens, GPU-seconds where there are no prices; `run_cost` is that of a run, for versions that call
    other models. `throughput` is output tokens per second of a call.
    """

    name: str
    lane: str | None
    active: float
    candidate: float
    difference: float
    low: float
    high: float
    active_runs: int
    candidate_runs: int


class Guardrails(Struct, frozen=True, kw_only=True):
    """When a version is rolled back. `false_alarm`: probability that one that is no worse is rolled back, over the
    whole trial. Nothing is decided before both versions have `min_runs` runs. Times are seconds. A version that was
    applied to all runs is compared for `watch_s` with the one before it in the `watch_s` before; None: never.
    """

    max_attainment_drop: float = 0.02
    max_error_rise: float = 0.01
    max_cost_rise: float = 0.10
    false_alarm: float = 0.05
    min_runs: int = 30
    check_interval_s: float = 5.0
    max_trial_s: float = 86_400.0
    watch_s: float | None = 3600.0


class SettingsState(Struct, frozen=True, kw_only=True):
    """The versions in use. `candidate` and `share` are those of a trial; `since` is when it began, or when the active
    version became active."""

    active: SettingsVersion
    candidate: SettingsVersion | None
    share: float | None
    since: float


class SettingsHistory(Struct, frozen=True, kw_only=True):
    """All versions and the latest changes, the latest first."""

    active: int
    candidate: int | None
    versions: tuple[SettingsVersion, ...]
    changes: tuple[SettingsChange, ...]


class SettingsComparison(Struct, frozen=True, kw_only=True):
    """The latest trial, or the latest version that was applied to all runs and the one before it. `since` is when it
    began, `until` is None while it goes on. `confidence`: probability that the true differences lie in all intervals at
    all times."""

    kind: ChangeKind
    active: int
    candidate: int
    since: float
    until: float | None
    confidence: float
    measures: tuple[Measure, ...]


class NewSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings to apply: sections of a configuration, or the number of a version. With a `share` below 1 only that
    fraction of the runs gets them. `force` applies a version that was made for other models."""

    sections: Sections | None = None
    version: int | None = None
    share: float | None = None
    note: str = ""
    force: bool = False
