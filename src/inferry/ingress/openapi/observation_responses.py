"""Responses of reports and of the diagnosis."""

from msgspec import Struct

from inferry.domain.reports import Cell, Column


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
