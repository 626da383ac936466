"""Responses of reports and of the diagnosis."""

from msgspec import Struct

from inferry.domain.reports import Cell, Column
from inferry.durable.dead_letters import DeadLetter


class ReportDescription(Struct, kw_only=True):
    """A report and what it shows."""

    name: str
    description: str


class ReportList(Struct, kw_only=True):
    """The reports."""

    reports: list[ReportDescription]


class ReportTable(Struct, kw_only=True):
    """A report. Rows have one field per column; times are Unix seconds."""

    report: str
    since: float
    until: float
    columns: list[Column]
    rows: list[dict[str, Cell]]
    notes: list[str]
    truncated: bool


class GroupScale(Struct, kw_only=True):
    """Advice for a worker group. `current` workers are up or starting; `desired` is what the group should have,
    `needed` what would be enough at this moment.
    """

    group: str
    current: int
    desired: int
    needed: int
    waiting_jobs: int
    waiting_work_seconds: float
    capacity_in_use_workers: float
    min_workers: int
    max_workers: int | None
    reason: str


class ScaleReport(Struct, kw_only=True):
    """How many workers each group should have."""

    groups: list[GroupScale]


class DeadLetterList(Struct, kw_only=True):
    """Batch items and async jobs that were given up: delivered too often without a result."""

    dead_letters: list[DeadLetter]
