"""Terminal output of `inferry bench`: progress bar, tables, warnings."""

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table as RichTable

from inferry.cli.terminal import console
from inferry.loadgen.load_test import Progress as BenchProgress
from inferry.loadgen.result import Result
from inferry.loadgen.sweep import SweepProgress
from inferry.loadgen.sweep_page import failure_rows, findings, latency_tables, throughput_table
from inferry.loadgen.sweep_result import SweepResult
from inferry.loadgen.tables import cost_table, failure_table, lane_table, tail_table
from inferry.report.formatting import seconds
from inferry.report.html import TEXT_COLUMNS, Table

MAX_LAG_MS, MAX_CLIENT_CPU = 20.0, 0.85


def make_progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[said]}", markup=False),
    )
    # Refreshed by the event loop: a drawing thread would compete with the measurement for the interpreter lock.
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)


class ProgressBar:
    """Updates the bar with the progress and state of the calls."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._tokens = 0
        self._at = 0.0

    def __call__(self, now: BenchProgress) -> None:
        counters = now.counters
        rate = (counters.tokens - self._tokens) / max(now.elapsed_s - self._at, 1e-3)
        self._tokens, self._at = counters.tokens, now.elapsed_s
        said = (
            f"{max(0.0, now.elapsed_s):.0f} s  sent {counters.sent:,}  in flight {counters.in_flight:,}  "
            f"done {counters.done:,}  failed {counters.failed:,}  {max(0.0, rate):,.0f} tokens/s"
        )
        ended = counters.done + counters.failed
        self._bar.update(self._task, total=max(now.calls, 1), completed=ended, said=said)
        self._bar.refresh()


class SweepProgressBar:
    """Shows the level in progress, and prints a line for each level that has ended."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._level = ProgressBar(bar, task)
        self._concurrency = 0

    def __call__(self, now: SweepProgress) -> None:
        if now.figures is not None:
            level = now.figures
            ttft = seconds(None if level.ttft is None else level.ttft.p95)
            self._bar.console.print(
                f"concurrency {level.concurrency:,}: {level.output_tokens_per_s:,.0f} output tokens/s, "
                f"TTFT {ttft} at p95, {level.done:,} calls done, {level.failed:,} failed",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            return
        if now.concurrency != self._concurrency:
            self._concurrency = now.concurrency
            self._level = ProgressBar(self._bar, self._task)
            self._bar.update(self._task, description=f"concurrency {now.concurrency:,} ({now.number}/{now.levels})")
        self._level(now.progress)


def show_sweep(result: SweepResult) -> None:
    out = console(160)
    out.print(rich_table(throughput_table(result)))
    for name, table in latency_tables(result):
        out.print(f"\n{name}", style="bold")
        out.print(rich_table(table))
    failures = failure_rows(result)
    if failures.rows:
        out.print()
        out.print(rich_table(failures))
    out.print(
        f"\n{result.workload}, lane {result.lane}, on {result.model} at {result.url}", soft_wrap=True, markup=False
    )
    for sentence in findings(result):
        out.print(sentence, soft_wrap=True, markup=False)
    busiest = max((level.client_cpu for level in result.levels), default=0.0)
    if busiest > MAX_CLIENT_CPU:
        warn(f"the generator used {busiest:.0%} of a core: it may have limited the results")
    if result.partial:
        warn("interrupted: calls in flight were dropped and do not count")


def comparison_warnings(results: Sequence[Result]) -> list[str]:
    """Differences that make results incomparable."""
    said = []
    if len({one.workload for one in results}) > 1 or len({one.seconds for one in results}) > 1:
        said.append(f"the workloads differ: {'; '.join(one.workload for one in results)}")
    if len({repr(one.slo_targets) for one in results}) > 1:
        said.append("the SLO targets differ")
    if len({one.model for one in results}) > 1:
        said.append(f"the models differ: {', '.join(one.model for one in results)}")
    said += [f"{one.label} was interrupted" for one in results if one.partial]
    return said


def show_result(result: Result) -> None:
    out = console(160)
    out.print(rich_table(lane_table([result])))
    out.print()
    out.print(rich_table(tail_table([result])))
    out.print()
    out.print(rich_table(cost_table([result])))
    failures = failure_table([result])
    if failures.rows:
        out.print()
        out.print(rich_table(failures))
    out.print(
        f"\n{result.workload} on {result.model} at {result.url}: {result.done:,} calls done, {result.failed:,} failed; "
        f"generator lag {result.generator.lag_p99_ms:.1f} ms at p99, "
        f"{result.generator.cpu:.0%} of a core",
        soft_wrap=True,
        markup=False,
    )
    for warning in warnings(result):
        warn(warning)


def warnings(result: Result) -> list[str]:
    """Reasons to distrust the figures."""
    said = []
    generator = result.generator
    if generator.lag_p99_ms > MAX_LAG_MS:
        said.append(f"the generator lagged {generator.lag_p99_ms:.0f} ms at p99: this machine is too busy")
    if generator.cpu > MAX_CLIENT_CPU:
        said.append(f"the generator used {generator.cpu:.0%} of a core: it may have limited the results")
    if result.shortened:
        said.append(f"{result.shortened:,} prompts were cut to fit the model's context")
    if result.partial:
        said.append("interrupted: calls in flight were dropped and do not count")
    return said


def rich_table(table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in table.headings:
        justify: Literal["left", "right"] = "left" if heading in TEXT_COLUMNS else "right"
        drawn.add_column(heading, justify=justify, no_wrap=heading != "message")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def note(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)


def warn(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"warning: {message}", style="yellow", markup=False, highlight=False)
