"""`inferry top`: lanes, workers and tenants of a running gateway, live."""

import time
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inferry.cli.diagnosis_client import Window, fetch_diagnosis
from inferry.cli.formats import EMPTY, format_count, format_ms, safe_text
from inferry.cli.gateway_client import DEFAULT_URL, AdminKey, GatewayProblem, Url
from inferry.cli.terminal import console, fail
from inferry.observe.diagnosis.facts import LaneFacts, WorkerFacts
from inferry.observe.diagnosis.findings import Diagnosis

DEFAULT_INTERVAL_S = 2.0
DEFAULT_WINDOW_S = 60.0
_COLOURS = {"healthy": "green", "problem": "red", "not_enough_data": "yellow"}


def top(
    url: Url = DEFAULT_URL,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two updates.")] = DEFAULT_INTERVAL_S,
    window: Window = None,
    admin_key: AdminKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, as plain text.")] = False,
) -> None:
    """Show the lanes, workers and tenants of a running gateway, live. Ctrl-C ends it."""
    window_s = window or DEFAULT_WINDOW_S
    try:
        found = fetch_diagnosis(url, admin_key, window_s)
    except GatewayProblem as problem:
        fail(str(problem), status=1)
    out = console(width=120)
    if once or not out.is_terminal:
        Console(file=out.file, width=out.width, highlight=False, color_system=None).print(render(found, url))
        return
    try:
        with Live(render(found, url), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    live.update(render(fetch_diagnosis(url, admin_key, window_s), url), refresh=True)
                except GatewayProblem as problem:
                    # The gateway may be restarting: keep asking.
                    live.update(Group(Text(f"{problem}; retrying", style="bold red")), refresh=True)
    except KeyboardInterrupt:
        return


def render(found: Diagnosis, url: str) -> Group:
    """The whole view."""
    alerts = "alerts off" if found.alerts is None else f"{found.alerts} alert{'' if found.alerts == 1 else 's'}"
    at = time.strftime("%H:%M:%S", time.localtime(found.at))
    cause = "" if found.cause is None else f" ({found.cause})"
    head = Text(f"{url}  {at}  last {found.window_s:.0f} s  {alerts}  ")
    head.append(f"{found.verdict.replace('_', ' ')}{cause}", style=f"bold {_COLOURS[found.verdict]}")
    return Group(head, Text(""), _lanes(found), Text(""), _workers(found), Text(""), _tenants(found))


def _lanes(found: Diagnosis) -> Table:
    table = _table("lane", "queued", "running", "calls/s", "wait p50", "wait p95", "TTFT p95", "ITL p95", "attained")
    table.add_column("target", justify="left")
    for lane in found.lanes:
        table.add_row(
            lane.lane,
            format_count(lane.depth_now),
            format_count(lane.running_now),
            f"{lane.calls_per_s:.1f}",
            *(format_ms(value) for value in (lane.wait_p50_ms, lane.wait_p95_ms, lane.ttft_p95_ms, lane.itl_p95_ms)),
            _attainment(lane),
            EMPTY if lane.ttft_ms is None else f"{format_ms(lane.ttft_ms)} + {format_ms(lane.itl_ms)}/token",
        )
    return table


def _attainment(lane: LaneFacts) -> Text:
    if lane.attainment is None:
        return Text(EMPTY)
    style = "green" if lane.attainment >= 0.99 else "yellow" if lane.attainment >= 0.9 else "red"
    return Text(f"{lane.attainment:.1%}", style=style)


def _workers(found: Diagnosis) -> Table:
    table = _table("worker", "running", "limit", "waiting", "KV", "batch", "GPU", "time/token")
    table.add_column("state", justify="left")
    for worker in found.workers:
        itl_ms = None if worker.traffic is None else worker.traffic.itl_ms
        table.add_row(
            safe_text(worker.worker),
            format_count(worker.running_now),
            format_count(worker.sequences),
            format_count(worker.waiting_now),
            _percent(worker.kv_ratio),
            EMPTY if worker.batch is None else f"{worker.batch:.1f}",
            _percent(worker.utilisation),
            format_ms(itl_ms),
            _state(worker),
        )
    return table


def _state(worker: WorkerFacts) -> Text:
    name = "drained" if worker.drained else worker.phase
    if worker.breaker != "closed":
        name += f", breaker {worker.breaker}"
    return Text(name, style="green" if name == "ready" else "red")


def _tenants(found: Diagnosis) -> Table:
    table = _table("tenant", "calls", "tokens", "cost", "wait")
    for tenant in found.tenants:
        table.add_row(
            safe_text(tenant.tenant),
            format_count(tenant.attempts),
            format_count(tenant.tokens),
            EMPTY if tenant.cost is None else f"{tenant.cost:.4g}",
            format_ms(tenant.queue_ms),
        )
    return table


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _percent(ratio: float | None) -> str:
    return EMPTY if ratio is None else f"{ratio:.0%}"
