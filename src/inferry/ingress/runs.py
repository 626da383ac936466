"""`/v1/runs…`: the runs of the caller's tenant.

Live runs come from the gateway's memory, ended ones from the ledger. A run of another tenant is reported as unknown.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from inferry.dispatch.gateway import Gateway, RunStatus
from inferry.domain.callers import Caller
from inferry.domain.errors import Conflict, GatewayError, InvalidRequest, NotFound, RunNotFound
from inferry.domain.runs import RunQueries, RunSummary, TimelinePosition, TimelineRows
from inferry.durable.batches import Batches
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.run_responses import live_run_item, recorded_run_item, run_detail
from inferry.ingress.run_timeline import TimelineCall, live_call, perfetto, place, recorded_call, timeline
from inferry.ingress.run_tools import ToolReport, ToolReports, read_report

T = TypeVar("T")
Refuse = Callable[[GatewayError, Request, Reply], None]
Fail = Callable[[Request, Reply], None]

PATHS = (
    "GET /v1/runs",
    "GET /v1/runs/{id}",
    "GET /v1/runs/{id}/timeline",
    "DELETE /v1/runs/{id}",
    "POST /v1/runs/{id}/finish",
)
PREFIX = "/v1/runs"
_FINISH = "/finish"
_TIMELINE = "/timeline"
_JSON = b"content-type: application/json\r\n"
_IDENTIFIER = re.compile(r"[\x21-\x7e]{1,256}")

MAX_LISTED = 200
MAX_STEPS = 1000
MAX_TIMELINE_CALLS = 1000
MAX_LIVE_RUNS = 200
"""Runs of a tree whose calls in flight are in its timeline."""
MAX_WAIT_MS = 10_000
DEFAULT_WAIT_MS = 1000
_MAX_LEDGER_READS = 8
"""Reads of the ledger per page of a listing, where many of its runs are listed from memory already."""


class RunEndpoints:
    """The endpoints under `/v1/runs`. Belongs to the event loop of its gateway; `reader` is None without a readable
    ledger."""

    def __init__(self, gateway: Gateway, reader: RunQueries | None, refuse: Refuse, fail: Fail) -> None:
        self._gateway = gateway
        self._reader = reader
        self._refuse = refuse
        self._fail = fail
        self._reading = asyncio.Lock()
        self._batches: Batches | None = None
        self._tool_reports = ToolReports()
        self._tasks: set[asyncio.Task[None]] = set()
        # Constant, so that a run keeps its position in a listing from page to page.
        self._epoch = gateway.wall() - gateway.now()

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        """Answer the request, at once or later, or raise a GatewayError. `path` is percent-encoded."""
        self.serve_tenant(caller.tenant.name, path, query, request, reply)

    def serve_tenant(self, tenant: str, path: str, query: str, request: Request, reply: Reply) -> None:
        """Answer a request about the runs of a tenant, which may come from an operator."""
        method = request.method
        rest = path.removeprefix(PREFIX)
        if rest in ("", "/"):
            if method not in (b"GET", b"HEAD"):
                raise WrongMethod(PREFIX, "GET, HEAD")
            work = self._list(tenant, _parse_query(query, "status", "parent", "since", "limit", "cursor"))
        elif not rest.startswith("/"):
            raise NotFound("unknown path")
        elif rest.endswith(_FINISH):
            # A run whose id ends in /finish or /timeline is addressed percent-encoded.
            if method != b"POST":
                raise WrongMethod(f"{PREFIX}/{{id}}{_FINISH}", "POST")
            _parse_query(query)
            work = self._finish(tenant, run_identifier(rest[1 : -len(_FINISH)]), read_report(request.body))
        elif rest.endswith(_TIMELINE):
            if method not in (b"GET", b"HEAD"):
                raise WrongMethod(f"{PREFIX}/{{id}}{_TIMELINE}", "GET, HEAD")
            params = _parse_query(query, "format", "limit", "cursor")
            work = self._timeline(tenant, run_identifier(rest[1 : -len(_TIMELINE)]), params)
        elif method == b"DELETE":
            work = self._cancel(tenant, run_identifier(rest[1:]), _parse_query(query, "wait_ms"))
        elif method in (b"GET", b"HEAD"):
            work = self._show(tenant, run_identifier(rest[1:]), _parse_query(query, "steps"))
        else:
            raise WrongMethod(f"{PREFIX}/{{id}}", "GET, HEAD, DELETE")
        task = asyncio.get_running_loop().create_task(self._answer(work, request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, work: Coroutine[None, None, Any], request: Request, reply: Reply) -> None:
        try:
            reply.respond(200, _JSON, msgspec.json.encode(await work))
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            self._fail(request, reply)

    def use_batches(self, batches: Batches) -> None:
        """Batches are runs, and end with them."""
        self._batches = batches

    def use_ledger(self, open_reader: Callable[[], RunQueries | None]) -> None:
        """Open another ledger off the event loop, and read from it from then on."""
        task = asyncio.get_running_loop().create_task(self._swap_reader(open_reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _swap_reader(self, open_reader: Callable[[], RunQueries | None]) -> None:
        async with self._reading:
            previous, self._reader = self._reader, await asyncio.to_thread(open_reader)
            if previous is not None:
                previous.close()

    async def close(self) -> None:
        """Close the ledger."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reader is not None:
            self._reader.close()

    # -- one run -----------------------------------------------------------------------------------------------------

    async def _show(self, tenant: str, run_id: str, params: dict[str, str]) -> dict[str, Any]:
        return await self._run_detail(tenant, run_id, _number(params, "steps", 20, minimum=0, maximum=MAX_STEPS))

    async def _run_detail(self, tenant: str, run_id: str, steps: int) -> dict[str, Any]:
        # In this order: a row written in between may be counted and not shown, but never shown and not counted.
        rows = await self._read(lambda reader: reader.jobs(limit=steps, tenant=tenant, run=run_id)) if steps else None
        recorded = await self._read(lambda reader: reader.runs(limit=1, tenant=tenant, run=run_id)) or []
        live = self._gateway.run_snapshot(tenant, run_id)
        # A cancelled run may have left nothing but its tombstone.
        if live is None and not recorded and not self._gateway.is_run_cancelled(tenant, run_id):
            raise RunNotFound(f"unknown run `{run_id}`")
        summary = recorded[0] if recorded else None
        ledger_is_ahead = live is None or (summary is not None and summary.jobs > live.totals.jobs)
        tree = await self._read(lambda reader: reader.tree(tenant, run_id)) if ledger_is_ahead and summary else None
        children = await self._read(lambda reader: reader.sub_runs(tenant, run_id, MAX_LISTED))
        return run_detail(
            run_id,
            live,
            summary,
            tree,
            children or [],
            rows or [],
            epoch=self._epoch,
            is_cancelled=self._gateway.is_run_cancelled(tenant, run_id),
            budget=self._gateway.run_budget(tenant, run_id),
            attempt_of=self._gateway.attempt_of,
            tools=self._tool_reports.of(tenant, run_id),
            steps=steps,
        )

    async def _timeline(self, tenant: str, run_id: str, params: dict[str, str]) -> dict[str, Any]:
        limit = _number(params, "limit", 200, minimum=1, maximum=MAX_TIMELINE_CALLS)
        format, cursor = params.get("format", "json"), params.get("cursor")
        if format not in ("json", "perfetto"):
            raise InvalidRequest("`format` must be json or perfetto", param="format")
        after = None if cursor is None else _decoded_cursor(cursor, tuple[float, str, int])
        # Before the ledger: a call that ends meanwhile is in both, and shown once.
        live = self._calls_in_flight(tenant, run_id)
        found = await self._read(lambda reader: reader.timeline(tenant, run_id, limit=limit, after=after))
        rows = found or TimelineRows([], None, {})
        is_known = self._gateway.has_run(tenant, run_id) or self._gateway.is_run_cancelled(tenant, run_id)
        if not live and not rows.entries and after is None and not is_known:
            raise RunNotFound(f"unknown run `{run_id}`")
        calls = [recorded_call(entry) for entry in rows.entries]
        has_more = len(calls) == limit
        if not has_more:
            known = {(call.job_id, call.attempt) for call in calls}
            calls += [call for call in live if (call.job_id, call.attempt) not in known]
        render = timeline if format == "json" else perfetto
        next_cursor = _cursor_at(rows.last) if has_more and rows.last is not None else None
        return render(run_id, place(calls, rows.ended_before), next_cursor, self._gateway.wall())

    def _calls_in_flight(self, tenant: str, run_id: str) -> list[TimelineCall]:
        """The calls in flight of a run and its sub-runs."""
        calls: list[TimelineCall] = []
        pending, seen = [run_id], 0
        while pending and seen < MAX_LIVE_RUNS and len(calls) < MAX_TIMELINE_CALLS:
            seen += 1
            snapshot = self._gateway.run_snapshot(tenant, pending.pop())
            if snapshot is not None:
                pending += snapshot.children
                attempts = [self._gateway.attempt_of(job.job_id) for job in snapshot.in_flight]
                calls += [
                    live_call(one.job, one, self._gateway.decision_of(one), self._epoch) for one in attempts if one
                ]
        return calls[:MAX_TIMELINE_CALLS]

    async def _cancel(self, tenant: str, run_id: str, params: dict[str, str]) -> dict[str, Any]:
        wait_ms = _number(params, "wait_ms", DEFAULT_WAIT_MS, minimum=0, maximum=MAX_WAIT_MS)
        batch = None if self._batches is None else await self._batches.find_unfinished(tenant, run_id)
        is_known = batch is not None
        if not is_known and not self._gateway.has_run(tenant, run_id):
            is_known = await self._ledger_has_run(tenant, run_id)
        report = await self._gateway.cancel_run(tenant, run_id, wait_s=wait_ms / 1000, is_known=is_known)
        if self._batches is not None and batch is not None:
            with suppress(Conflict, NotFound):  # it has ended meanwhile
                await self._batches.cancel(tenant, batch.api, batch.id)
        done = {"id": run_id, "object": "run.cancelled", "status": RunStatus.CANCELLED.value}
        return done | msgspec.structs.asdict(report)

    async def _finish(self, tenant: str, run_id: str, report: ToolReport | None) -> dict[str, Any]:
        if self._gateway.has_run(tenant, run_id) or not await self._ledger_has_run(tenant, run_id):
            self._gateway.finish_run(tenant, run_id)
        else:
            self._gateway.release_run(tenant, run_id)  # its calls came through another gateway
        if report is not None:
            self._tool_reports.keep(tenant, run_id, report)
        return await self._run_detail(tenant, run_id, 0)

    async def _ledger_has_run(self, tenant: str, run_id: str) -> bool:
        return bool(await self._read(lambda reader: reader.has_run(tenant, run_id)))

    async def _read(self, read_query: Callable[[RunQueries], T]) -> T | None:
        reader = self._reader
        if reader is None:
            return None
        async with self._reading:  # one at a time: the reader has one connection
            return await asyncio.to_thread(read_query, reader)

    # -- listing -----------------------------------------------------------------------------------------------------

    async def _list(self, tenant: str, params: dict[str, str]) -> dict[str, Any]:
        limit = _number(params, "limit", 20, minimum=1, maximum=MAX_LISTED)
        status, parent = params.get("status"), params.get("parent")
        if status is not None and status not in {one.value for one in RunStatus}:
            names = ", ".join(one.value for one in RunStatus)
            raise InvalidRequest(f"`status` must be one of {names}", param="status")
        since = _time(params, "since")
        before = _cursor(params.get("cursor"))

        def is_wanted(at: float, item_status: RunStatus, its_parent: str | None) -> bool:
            return (
                (before is None or at < before)
                and (since is None or at >= since)
                and (status is None or item_status.value == status)
                and (parent is None or its_parent == parent)
            )

        found: dict[str, tuple[float, dict[str, Any]]] = {}
        for run, item_status in self._gateway.newest_runs(tenant):
            at = self._epoch + run.last_call_at
            if is_wanted(at, item_status, None if run.parent is None else run.parent.run_id):
                found[run.run_id] = (at, live_run_item(run, item_status, self._epoch))
            if len(found) > limit or (since is not None and at < since):
                break
        until, is_all = before, False
        for _ in range(_MAX_LEDGER_READS):
            read_query = partial(
                _recorded_runs, limit=limit + 1, tenant=tenant, since=since, parent=parent, before=until
            )
            recorded = await self._read(read_query) or []
            for row in recorded:
                at, item_status = row.ended_at, self._recorded_status(row)
                # A run in memory is listed from there.
                if not self._gateway.has_run(tenant, row.run_id) and is_wanted(at, item_status, row.parent_run):
                    found[row.run_id] = (at, recorded_run_item(row, item_status))
            is_all = len(recorded) <= limit
            if is_all or sum(at >= recorded[-1].ended_at for at, _ in found.values()) > limit:
                break
            until = recorded[-1].ended_at
        ordered = sorted(found.values(), key=lambda one: -one[0])
        next_at = ordered[limit - 1][0] if len(ordered) > limit else None if is_all else until
        return {
            "object": "list",
            "data": [one for _, one in ordered[:limit]],
            "has_more": next_at is not None,
            "next_cursor": None if next_at is None else _cursor_at(next_at),
        }

    def _recorded_status(self, row: RunSummary) -> RunStatus:
        return RunStatus.CANCELLED if self._gateway.is_run_cancelled(row.tenant, row.run_id) else RunStatus.IDLE


def _recorded_runs(reader: RunQueries, **requested: Any) -> list[RunSummary]:
    return reader.runs(**requested)


# -- parameters ------------------------------------------------------------------------------------------------------


def run_identifier(raw: str) -> str:
    """The id of a run in a path. Raises InvalidRequest."""
    text = unquote(raw, "latin-1")
    if _IDENTIFIER.fullmatch(text) is None:
        raise InvalidRequest("a run id must be 1 to 256 printable ASCII characters without spaces", param="id")
    return text


def _parse_query(query: str, *names: str) -> dict[str, str]:
    params = dict(parse_qsl(query, keep_blank_values=True, encoding="latin-1"))
    for name in params:
        if name not in names:
            known = f"supported are {', '.join(names)}" if names else "this path has none"
            raise InvalidRequest(f"unknown query parameter; {known}", param="query")
    return params


def _number(params: dict[str, str], name: str, default: int, *, minimum: int, maximum: int) -> int:
    text = params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not minimum <= int(text) <= maximum:
        raise InvalidRequest(f"`{name}` must be an integer from {minimum} to {maximum}", param=name)
    return int(text)


def _time(params: dict[str, str], name: str) -> float | None:
    text = params.get(name)
    if text is None:
        return None
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII) is None:
        raise InvalidRequest(f"`{name}` must be seconds since the Unix epoch", param=name)
    return float(text)


def _cursor(text: str | None) -> float | None:
    return None if text is None else _decoded_cursor(text, float)


def _decoded_cursor(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text.encode("latin-1")), type=kind)
    except (binascii.Error, msgspec.MsgspecError, ValueError):
        raise InvalidRequest("invalid cursor", param="cursor") from None


def _cursor_at(position: float | TimelinePosition) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode()
