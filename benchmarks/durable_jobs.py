"""Async jobs through Redis Streams with an engine that answers at once: rate, memory, and cost per job.

One gateway's part of durable work, without HTTP and without the scheduler: concurrent clients create jobs, which are
stored in the database and queued; then one consumer takes, loads, executes, stores and acknowledges them. All jobs are
queued before the first one runs, so that Redis holds all of them at once. The memory of the process does not grow with
their number. Environment variables: DURABLE_JOBS, the number of jobs; DURABLE_CLIENTS, those that create jobs at once;
REDIS_SERVER, the program (default: that of `make test`, or the one in PATH); DURABLE_LEDGER, the URL of one database.
By default a SQLite file and a PostgreSQL server are measured, both new and in /tmp, with about 1 kB per job.
"""

import asyncio
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis

from benchmarks.postgres import run_postgres
from inferry.cli.checkout import ROOT
from inferry.cluster.redis_work_queue import RedisWorkQueue
from inferry.domain.async_jobs import AsyncJobDetail
from inferry.domain.clock import SystemClock
from inferry.domain.storage import StorageLimits
from inferry.durable.async_jobs import AsyncJobs, NewJob
from inferry.durable.callback_policy import CallbackPolicy
from inferry.durable.dead_letters import DeadLetters
from inferry.durable.documents import Documents
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.durable.executor import StoreExecutor
from inferry.durable.ids import new_id
from inferry.durable.queued_jobs import QueuedJobs
from inferry.durable.work_runner import WorkRunner
from inferry.durable.work_source import DatabaseWork
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.batches import BatchStore
from inferry.ledger.stores.callback_secrets import CallbackSecretStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.documents import DocumentStore

JOBS = 20_000
TENANTS = 10
CLIENTS = 64
CONCURRENCY = 128
PROGRESS_S = 5.0
TIMEOUT_S = 60.0
"""For an answer of Redis: on a busy machine nothing is to be delivered twice."""
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}],"max_tokens":16}' % (b"word " * 40)
ANSWER = CallAnswer(status=200, body=b'{"choices":[{"message":{"content":"%s"}}]}' % (b"word " * 16), request_id="r")


class TrivialEngine:
    def paths(self) -> frozenset[str]:
        return frozenset({"/v1/chat/completions"})

    async def call(self, call: StoredCall) -> CallAnswer:
        await asyncio.sleep(0)
        return ANSWER


def measure() -> dict[str, Any]:
    """What was found, by kind of database."""
    number = int(os.environ.get("DURABLE_JOBS", JOBS))
    if (ledger := os.environ.get("DURABLE_LEDGER")) is not None:
        return {ledger.partition(":")[0]: measure_with(ledger, number)}
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        found = {"sqlite": measure_with(f"sqlite:///{name}/ledger.db", number)}
    with run_postgres() as server:
        return found | {"postgresql": measure_with(server.url, number)}


def measure_with(ledger: str, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name, _redis_server(Path(name)) as (url, pid):
        return asyncio.run(_measure(number, url, pid, ledger))


async def _measure(number: int, url: str, redis_pid: int, ledger: str) -> dict[str, Any]:
    database, executor, clock = LedgerDatabase(ledger), StoreExecutor(), SystemClock()
    queue = RedisWorkQueue(url, timeout_s=TIMEOUT_S)
    store, engine = AsyncJobStore(database), TrivialEngine()
    dead_letters = DeadLetters(Documents(DocumentStore(database), executor, clock))
    work = DatabaseWork(
        store,
        BatchStore(database),
        executor,
        clock,
        dead_letters,
        write_ledger=lambda: None,
        ttl_s=None,
        on_end=lambda: None,
    )
    runner = WorkRunner(queue, work, engine, clock, consumer="bench", lanes={"P2": CONCURRENCY})
    queued = QueuedJobs(store, executor, queue, work, runner, clock, on_end=lambda: None)
    secrets = CallbackSecretStore(database)
    limits = StorageLimits(max_jobs_per_tenant=number)
    jobs = AsyncJobs(store, secrets, executor, queued, engine, limits, CallbackPolicy(), clock)
    with redis.Redis.from_url(url) as client:
        empty_bytes = _used(client)
        accepting = await _timed(redis_pid, _accept(number, jobs, int(os.environ.get("DURABLE_CLIENTS", CLIENTS))))
        await queued.close()  # what was created is queued
        sweep = await _timed(redis_pid, queued.sweep())
        queued_bytes = _used(client)
        running = await _timed(redis_pid, _run(number, runner, work))
        await runner.close()
        assert not store.unfinished_page(("", ""), 1), "a job has not ended"
        result = {
            "jobs": number,
            "redis": str(client.info("server")["redis_version"]),
            "accepted_per_s": round(number / accepting.seconds, 1),
            "accept_cpu_us_per_job": round(1e6 * accepting.cpu_s / number, 1),
            "ended_per_s": round(number / running.seconds, 1),
            "seconds": round(running.seconds, 2),
            "sweep_of_all_s": round(sweep.seconds, 2),
            "cpu_us_per_job": round(1e6 * running.cpu_s / number, 1),
            "redis_cpu_us_per_job": round(1e6 * (accepting.redis_cpu_s + running.redis_cpu_s) / number, 1),
            "redis_bytes_per_queued_job": round((queued_bytes - empty_bytes) / number, 1),
            "redis_mb_at_most": round(queued_bytes / 1e6, 2),
            "redis_mb_afterwards": round(_used(client) / 1e6, 2),
            "process_mb_at_most": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, 1),
            "database_bytes_per_job": _file_bytes(ledger, number),
            "deliveries": dict(runner.deliveries),
        }
    await queue.close()
    await executor.close()
    database.close()
    print(ledger.partition(":")[0], result, flush=True)
    return result


class _Cost(NamedTuple):
    seconds: float
    cpu_s: float
    redis_cpu_s: float


async def _timed(redis_pid: int, work: Coroutine[Any, Any, None]) -> _Cost:
    began, own_cpu, redis_cpu = time.monotonic(), time.process_time(), _cpu_s(redis_pid)
    await work
    return _Cost(time.monotonic() - began, time.process_time() - own_cpu, _cpu_s(redis_pid) - redis_cpu)


async def _accept(number: int, jobs: AsyncJobs, clients: int) -> None:
    """Create the jobs as requests to a gateway do."""
    numbers, done, began = iter(range(number)), 0, time.monotonic()

    async def client() -> None:
        nonlocal done
        for count in numbers:
            id = new_id("job_")
            new = NewJob(
                id=id,
                tenant=f"tenant-{count % TENANTS}",
                key_id=None,
                endpoint="/v1/chat/completions",
                lane="P2",
                body=BODY,
                detail=AsyncJobDetail(run_id=id, step_id=id),
            )
            await jobs.create(new)
            done += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
        while done < number:
            await _progress("accepted", lambda: done, number, began)


async def _run(number: int, runner: WorkRunner, work: DatabaseWork) -> None:
    began = time.monotonic()
    runner.start()
    while work.ended_jobs["completed"] < number:
        await _progress("ended", lambda: work.ended_jobs["completed"], number, began)


def _file_bytes(ledger: str, number: int) -> float | None:
    path = Path(ledger.partition(":///")[2])
    return round(path.stat().st_size / number, 1) if ledger.startswith("sqlite") else None


async def _progress(verb: str, count: Any, number: int, began: float) -> None:
    until = time.monotonic() + PROGRESS_S
    while count() < number and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print(f"{count()} of {number} {verb} after {time.monotonic() - began:.0f} s", flush=True)


@contextmanager
def _redis_server(directory: Path) -> Iterator[tuple[str, int]]:
    installed = ROOT / ".venv" / "redis" / "redis-server"
    program = os.environ.get("REDIS_SERVER") or (str(installed) if installed.exists() else shutil.which("redis-server"))
    if program is None:
        raise SystemExit("redis-server is missing: set REDIS_SERVER to the program")
    path = directory / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(directory)]
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
        try:
            while not path.exists():
                assert process.poll() is None, "redis-server ended"
                time.sleep(0.01)
            yield f"unix://{path}", process.pid
        finally:
            process.kill()


def _used(client: "redis.Redis") -> int:
    found: Any = client.info("memory")
    return int(found["used_memory"])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
