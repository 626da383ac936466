"""`GET /admin/reports` and `GET /admin/reports/{name}`: reports of the ledger, as JSON or CSV."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

from inferry.domain.errors import InvalidRequest, LedgerUnavailable, NotFound
from inferry.domain.prices import Price
from inferry.domain.reports import (
    DEFAULT_ROWS,
    MAX_BUDGET,
    MAX_PERIOD_S,
    MAX_ROWS,
    REPORTS,
    Report,
    ReportQuery,
    ReportReader,
    RunBudget,
    as_csv,
    as_json,
    default_period,
    is_period,
)
from inferry.ingress.admin_endpoint import AdminEndpoint, Fail, Refuse, Text, check_names, read_number

PREFIX = "/admin/reports"
PATHS = (f"GET {PREFIX}", f"GET {PREFIX}/{{name}}")
PARAMETERS = {
    "since": "Begin of the period: Unix seconds or ISO 8601.",
    "until": "End of the period, excluded; default: now.",
    "before_since": "`compare`: begin of the earlier period.",
    "before_until": "`compare`: end of the earlier period; default: begin of the later one.",
    "tenant": "Only this tenant.",
    "limit": f"Maximum number of rows, up to {MAX_ROWS}.",
    "budget": "Budget per run in money, instead of the tenants' own.",
    "format": "`json` or `csv`.",
}
_MAX_TENANT_CHARS = 256


class AdminReports(AdminEndpoint):
    """The endpoints. Every report opens the ledger anew, off the event loop; one report is computed at a time.

    `open_reader` returns None for a ledger that cannot be read. `budgets` are the tenants' run budgets, `prices` those
    of the configuration.
    """

    def __init__(
        self,
        refuse: Refuse,
        fail: Fail,
        open_reader: Callable[[], ReportReader | None],
        budgets: Callable[[], Mapping[str, RunBudget]],
        prices: Mapping[str, Price],
        wall: Callable[[], float],
    ) -> None:
        super().__init__(refuse, fail)
        self._open_reader = open_reader
        self._budgets = budgets
        self._prices = prices
        self._wall = wall
        self._turn = asyncio.Lock()

    def owns(self, path: str) -> bool:
        return path == PREFIX or path.startswith(f"{PREFIX}/")

    def route(self, path: str, query: dict[str, str]) -> Coroutine[None, None, Any] | None:
        if path == PREFIX:
            check_names(query)
            return self._list()
        if not path.startswith(f"{PREFIX}/"):
            return None
        name = path.removeprefix(f"{PREFIX}/")
        if name not in REPORTS:
            raise NotFound(f"unknown report; there are {', '.join(REPORTS)}")
        check_names(query, *PARAMETERS)
        form = query.get("format", "json")
        if form not in ("json", "csv"):
            raise InvalidRequest("`format` must be json or csv", param="format")
        return self._show(name, self._read_query(name, query), form)

    async def _list(self) -> dict[str, Any]:
        return {"reports": [{"name": name, "description": text} for name, text in REPORTS.items()]}

    async def _show(self, name: str, query: ReportQuery, form: str) -> Any:
        async with self._turn:
            report = await asyncio.to_thread(self._read, name, query)
        if form == "csv":
            return Text("text/csv; charset=utf-8", as_csv(report), f"inferry-{name}.csv")
        return as_json(report)

    def _read(self, name: str, query: ReportQuery) -> Report:
        reader = self._open_reader()
        if reader is None:
            raise LedgerUnavailable("the ledger cannot be read; a ledger in memory has no reports")
        try:
            return reader.report(name, query)
        finally:
            reader.close()

    def _read_query(self, name: str, query: dict[str, str]) -> ReportQuery:
        tenant = query.get("tenant")
        if tenant is not None and not 1 <= len(tenant) <= _MAX_TENANT_CHARS:
            raise InvalidRequest("`tenant` must be the name of a tenant", param="tenant")
        since, until = default_period(name, self._wall(), _time(query, "since"), _time(query, "until"))
        before_since, before_until = _time(query, "before_since"), _time(query, "before_until")
        _check_period("since", since, until)
        if before_since is not None:
            _check_period("before_since", before_since, since if before_until is None else before_until)
        return ReportQuery(
            since=since,
            until=until,
            tenant=tenant,
            limit=int(read_number(query, "limit", 1, MAX_ROWS) or DEFAULT_ROWS),
            before_since=before_since,
            before_until=before_until,
            budget=read_number(query, "budget", 0, MAX_BUDGET),
            budgets=self._budgets(),
            prices=self._prices,
        )


def _time(query: dict[str, str], name: str) -> float | None:
    text = query.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            seconds = -1.0
        else:
            seconds = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds < 1e11:
        raise InvalidRequest(f"`{name}` must be Unix seconds or ISO 8601, such as 2026-11-01T00:00Z", param=name)
    return seconds


def _check_period(name: str, since: float, until: float) -> None:
    if not is_period(since, until):
        days = MAX_PERIOD_S / 86_400
        raise InvalidRequest(f"the period must begin before it ends and last at most {days:.0f} days", param=name)
