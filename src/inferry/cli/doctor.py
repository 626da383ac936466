"""`inferry doctor`: where the latency of a running gateway comes from, and the one setting to try."""

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferry.cli.diagnosis_client import Window, fetch_diagnosis
from inferry.cli.formats import EMPTY, format_count, format_ms, format_seconds, safe_text
from inferry.cli.gateway_client import DEFAULT_URL, AdminKey, GatewayProblem, Url
from inferry.cli.terminal import console, fail
from inferry.observe.diagnosis.findings import Diagnosis, Finding
from inferry.observe.diagnosis.latency import STAGES

DEFAULT_WINDOW_S = 300.0
PROBLEM_STATUS = 3
_COLOURS = {"healthy": "green", "problem": "red", "not_enough_data": "yellow"}
_TITLES = {"healthy": "Healthy", "problem": "Problem", "not_enough_data": "Not enough data"}


def doctor(
    url: Url = DEFAULT_URL,
    window: Window = None,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="The diagnosis as JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help=f"Exit with status {PROBLEM_STATUS} where there is a problem.")
    ] = False,
) -> None:
    """Say where the latency of a running gateway comes from, and which one setting to try."""
    try:
        found = fetch_diagnosis(url, admin_key, window or DEFAULT_WINDOW_S)
    except GatewayProblem as problem:
        fail(str(problem), status=1)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        show(found, console(width=100))
    if check and found.verdict == "problem":
        raise typer.Exit(PROBLEM_STATUS)


def show(found: Diagnosis, out: Console) -> None:
    """Print the diagnosis. Names come from clients and operators, so they are printed as plain text."""
    first = found.findings[0] if found.findings else None
    title = _TITLES[found.verdict] if first is None else f"Problem: {first.cause} ({first.stage}) at {first.where}"
    out.print(_line(title, f"bold {_COLOURS[found.verdict]}"))
    if first is None:
        out.print(_line(found.summary))
    else:
        _show_finding(found, first, out)
    _show_split(found, out)
    if len(found.findings) > 1:
        out.print(_line("\nAlso seen", "bold"))
        for one in found.findings[1:]:
            out.print(_line(f"  {one.cause}: {one.summary}"))
    if found.advice:
        out.print(_line("\nWhat fits this traffic", "bold"))
        for advice in found.advice:
            out.print(_line(f"  {advice.about}: {advice.choice}. {advice.why[:1].upper()}{advice.why[1:]}"))


def _show_finding(found: Diagnosis, finding: Finding, out: Console) -> None:
    out.print(_line(finding.summary))
    seconds = min(found.window_s, found.observed_s)
    out.print(_line(f"\nEvidence, from the last {format_seconds(seconds)}", "bold"))
    for one in finding.evidence:
        out.print(_line(f"  {one.text}"))
    out.print(_line("\nTry", "bold"))
    out.print(_line(f"  {finding.setting.text}"))


def _show_split(found: Diagnosis, out: Console) -> None:
    if not found.split:
        return
    out.print(_line("\nWhere the time goes, mean per call", "bold"))
    table = Table(box=None, padding=(0, 1, 0, 2), pad_edge=False)
    table.add_column("  lane")
    for name in ("calls", "total", *STAGES):
        table.add_column(name, justify="right", no_wrap=True)
    for lane in found.split:
        parts = {part.stage: part for part in lane.parts}
        cells = [
            EMPTY if (part := parts.get(stage)) is None else f"{format_ms(part.mean_ms)} {part.share:.0%}"
            for stage in STAGES
        ]
        table.add_row(f"  {lane.lane}", format_count(lane.calls), format_ms(lane.total_ms), *cells)
    out.print(table)


def _line(text: str, style: str = "") -> Text:
    lines = [safe_text(line) for line in text.split("\n")]
    joined = Text("\n").join(lines)
    joined.stylize(style)
    return joined
