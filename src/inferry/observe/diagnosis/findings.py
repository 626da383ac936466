"""Results of a diagnosis."""

from typing import Literal

from msgspec import Struct

from inferry.domain.traffic import TenantTraffic
from inferry.observe.diagnosis.facts import LaneFacts, WorkerFacts

Verdict = Literal["healthy", "problem", "not_enough_data"]
Stage = Literal["admission", "queue", "batching", "prefill", "decode", "tool", "client", "worker", "gateway"]
"""Where the time or the calls are lost."""


class Evidence(Struct, frozen=True):
    """One measured figure: what it is, its value with the unit, and what it is compared with."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def text(self) -> str:
        shown = f"{self.what}: {_number(self.value, self.unit)}"
        return shown if self.limit is None else f"{shown} (compare {_number(self.limit, self.unit)})"


class Setting(Struct, frozen=True):
    """The one change to try. `key` is a configuration key, an engine flag or an action; `now` is the present value."""

    kind: Literal["config", "engine flag", "action"]
    key: str
    value: str
    now: str | None = None

    @property
    def text(self) -> str:
        was = "" if self.now is None else f" (now {self.now})"
        return f"{self.key}: {self.value}{was}" if self.kind == "config" else f"{self.key} {self.value}{was}".strip()


class Finding(Struct, frozen=True, kw_only=True):
    """One cause, with its evidence. `where` names the lane, worker or tenant.

    `late_ms`: mean time beyond the target that the cause explains per call; None where it is unknown.
    """

    cause: str
    stage: Stage
    where: str
    summary: str
    evidence: tuple[Evidence, ...]
    setting: Setting
    late_ms: float | None = None


class LatencyPart(Struct, frozen=True):
    """Mean time per call in one stage; `share` is its fraction of the whole."""

    stage: Stage
    mean_ms: float
    share: float


class LaneSplit(Struct, frozen=True):
    """Where the time of a lane's calls went."""

    lane: str
    calls: int
    total_ms: float
    parts: tuple[LatencyPart, ...]


class Advice(Struct, frozen=True):
    """What fits the traffic that was seen, and why."""

    about: Literal["batching mode", "technique", "scale"]
    choice: str
    why: str


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The verdict, the first cause, and what else was found, with the figures behind it. `at` is Unix seconds.

    `alerts` is the number of alerts that fire, None where alerts are not evaluated.
    """

    at: float
    window_s: float
    observed_s: float
    verdict: Verdict
    cause: str | None
    summary: str
    findings: tuple[Finding, ...]
    split: tuple[LaneSplit, ...]
    advice: tuple[Advice, ...]
    lanes: tuple[LaneFacts, ...]
    workers: tuple[WorkerFacts, ...]
    tenants: tuple[TenantTraffic, ...]
    alerts: int | None = None


def _number(value: float, unit: str) -> str:
    if unit == "ratio":
        return f"{value:.0%}"
    if unit == "ms":
        return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
    shown = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
    return f"{shown} {unit}".strip()
