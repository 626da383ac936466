"""`inferry run-batch`: a file of requests in, a file of results out."""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from inferry.cli.batch_file import (
    MAX_WAITING,
    NotTheSame,
    RequestFile,
    ResultFile,
    finished_results,
    first_endpoint,
    numbered_lines,
)
from inferry.cli.batch_targets import HttpTarget, TargetError, local_target
from inferry.cli.config.loader import load
from inferry.cli.config.schema import ConfigError
from inferry.cli.terminal import check_key
from inferry.domain.clock import SystemClock
from inferry.domain.storage import Batch, BatchDetail
from inferry.durable.batch_run import BatchRun
from inferry.durable.execute import Execute
from inferry.durable.ids import new_id

WINDOW_S = 365 * 86_400.0
API_KEY = "OPENAI_API_KEY"
INTERRUPTED = 130


def run_batch(
    requests: Annotated[
        Path, typer.Argument(help="JSONL with `custom_id`, `method`, `url` and `body`, as for /v1/batches.")
    ],
    results: Annotated[Path, typer.Argument(help="JSONL of results, one line per request, in the same order.")],
    url: Annotated[
        str | None,
        typer.Option("--url", help=f"URL of a gateway, with the key in {API_KEY}. Default: workers in this process."),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Configuration of the workers in this process.", metavar="FILE"),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Maximum number of requests in flight.")] = 64,
) -> None:
    """Execute a file of requests. A second run continues behind the results that are there.

    Exits with 0 if every request succeeded, 1 if some failed, 2 if it could not run.
    """
    if not requests.is_file():
        _fail(f"no such file: {requests}")
    if requests.resolve() == results.resolve():
        _fail("the results would replace the requests; name another file")
    try:
        endpoint = first_endpoint(requests)
        done, failed = finished_results(requests, results)
        job = _Job(requests, results, endpoint, done, failed, concurrency)
        asyncio.run(_execute(job, url, config_file))
    except (ValueError, NotTheSame, TargetError, ConfigError, OSError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command continues", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    Console(stderr=True, soft_wrap=True).print(
        f"{job.done} results in {results}, {job.failed} of them errors", highlight=False, markup=False
    )
    raise typer.Exit(1 if job.failed else 0)


class _Job:
    """One run of the command."""

    def __init__(self, requests: Path, results: Path, endpoint: str, done: int, failed: int, concurrency: int) -> None:
        self.done = done
        self.failed = failed
        self.concurrency = concurrency
        self._requests = requests
        self._results = results
        self._endpoint = endpoint
        self._written_results: ResultFile
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    async def run(self, execute: Execute) -> None:
        """Execute what has no result."""
        now = SystemClock.wall()
        id = new_id("batch_")
        batch = Batch(
            id=id,
            tenant="default",
            key_id=None,
            api="openai",
            status="in_progress",
            endpoint=self._endpoint,
            created_at=now,
            deadline=now + WINDOW_S,
            detail=BatchDetail(),
        )
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            self._requests.open("rb") as file,
            self._requests.open("rb") as again,
            self._results.open("ab") as out,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ):
            self._progress = progress
            self._bar = progress.add_task("requests", total=self._count(), completed=self.done)
            self._written_results = ResultFile(out, id, self._numbers_left(again, self.done), self._written)
            requests = RequestFile(file, self._endpoint, self.done, self._written_results.fail)
            run = BatchRun(batch, requests.page, execute, self._written_results, SystemClock(), self._share)
            await run.run()

    def _share(self) -> int:
        """Fewer requests are begun while many results wait for an earlier one."""
        is_behind = self._written_results.waiting >= MAX_WAITING * self.concurrency
        return 1 if is_behind else self.concurrency

    def _count(self) -> int:
        with self._requests.open("rb") as file:
            return sum(1 for _ in numbered_lines(file))

    def _numbers_left(self, file: BinaryIO, skip: int) -> Iterator[int]:
        return (number for position, (number, _) in enumerate(numbered_lines(file)) if position >= skip)

    def _written(self, is_good: bool) -> None:
        self.done += 1
        self.failed += not is_good
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=self.done)


async def _execute(job: _Job, url: str | None, config_file: Path | None) -> None:
    if url is None:
        logging.basicConfig(level=logging.WARNING)
        async with local_target(load(config_file)) as execute:
            await job.run(execute)
        return
    if config_file is not None:
        raise TargetError("--config describes workers in this process; omit it with --url")
    target = HttpTarget(url, check_key(os.environ.get(API_KEY), API_KEY), job.concurrency)
    try:
        await asyncio.to_thread(target.check)
        await job.run(target)
    finally:
        target.close()


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"inferry: {message}", style="bold red", markup=False, highlight=False)
    raise typer.Exit(2)
