"""Async jobs through Redis Streams with an engine that answers at once: rate, memory, and cost per job.

One gateway's part of durable work, without HTTP and without the scheduler: jobs are stored in the database and queued,
then one consumer takes, loads, executes, stores and acknowledges them. All jobs are queued before the first one runs,
so that Redis holds all of them at once. Environment variables: DURABLE_JOBS, the number of jobs; REDIS_SERVER, the
program (default: that of `make test`, or the one in PATH); DURABLE_LEDGER, a database (default: a new SQLite file).
"""

import asyncio
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from inferry.cli.checkout import ROOT
from inferry.cluster.redis_work_queue import RedisWorkQueue
from inferry.domain.async_jobs import AsyncJob, AsyncJobDetail
from inferry.domain.clock import SystemClock
from inferry.domain.work_queue import NewWork
from inferry.durable.dead_letters import DeadLetters
from inferry.durable.documents import Documents
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.durable.executor import StoreExecutor
from inferry.durable.queued_jobs import QueuedJobs
from inferry.durable.work_runner import WorkRunner
from inferry.durable.work_source import DatabaseWork
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.batches import BatchStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.documents import DocumentStore

JOBS = 5_000
TENANTS = 10
CONCURRENCY = 128
PROGRESS_S = 5.0
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}],"max_tokens":16}' % (b"word " * 40)
ANSWER = CallAnswer(status=200, body=b'{"choices":[{"message":{"content":"%s"}}]}' % (b"word " * 16), request_id="r")


class TrivialEngine:
    def paths(self) -> frozenset[str]:
        return frozenset({"/v1/chat/completions"})

    async def call(self, call: StoredCall) -> CallAnswer:
        await asyncio.sleep(0)
        return ANSWER


def measure(jobs: int | None = None) -> dict[str, Any]:
    number = jobs or int(os.environ.get("DURABLE_JOBS", JOBS))
    with tempfile.TemporaryDirectory(dir="/tmp") as name, _redis_server(Path(name)) as (url, pid):
        ledger = os.environ.get("DURABLE_LEDGER", f"sqlite:///{name}/ledger.db")
        return asyncio.run(_measure(number, url, pid, ledger))


async def _measure(number: int, url: str, redis_pid: int, ledger: str) -> dict[str, Any]:
    database, executor, queue, clock = LedgerDatabase(ledger), StoreExecutor(), RedisWorkQueue(url), SystemClock()
    store = AsyncJobStore(database)
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
    runner = WorkRunner(queue, work, TrivialEngine(), clock, consumer="bench", lanes={"P2": CONCURRENCY})
    client = redis.Redis.from_url(url)
    empty_bytes = _used(client)
    accepted_s = await _accept(number, store, executor, queue)
    queued_bytes = _used(client)
    sweeper = QueuedJobs(store, executor, queue, work, runner, clock, on_end=lambda: None)
    began = time.monotonic()
    await sweeper.sweep()
    sweep_s = time.monotonic() - began
    own_cpu, redis_cpu, began = time.process_time(), _cpu_s(redis_pid), time.monotonic()
    runner.start()
    while work.ended_jobs["completed"] < number:
        await _progress("ended", lambda: work.ended_jobs["completed"], number, began)
    seconds = time.monotonic() - began
    own_cpu, redis_cpu = time.process_time() - own_cpu, _cpu_s(redis_pid) - redis_cpu
    await runner.close()
    left = store.unfinished_page("", 1)
    assert not left, "a job has not ended"
    result = {
        "jobs": number,
        "database": ledger.partition(":")[0],
        "redis": str(client.info("server")["redis_version"]),
        "accepted_per_s": round(number / accepted_s, 1),
        "ended_per_s": round(number / seconds, 1),
        "seconds": round(seconds, 2),
        "sweep_of_all_s": round(sweep_s, 2),
        "cpu_us_per_job": round(1e6 * own_cpu / number, 1),
        "redis_cpu_us_per_job": round(1e6 * redis_cpu / number, 1),
        "redis_bytes_per_queued_job": round((queued_bytes - empty_bytes) / number, 1),
        "redis_mb_at_most": round(queued_bytes / 1e6, 2),
        "redis_mb_afterwards": round(_used(client) / 1e6, 2),
        "process_mb_at_most": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, 1),
        "deliveries": dict(runner.deliveries),
    }
    client.close()
    await queue.close()
    await executor.close()
    database.close()
    print(result, flush=True)
    return result


async def _accept(number: int, store: AsyncJobStore, executor: StoreExecutor, queue: RedisWorkQueue) -> float:
    """Store and queue the jobs as a gateway does; return the seconds."""
    began = shown = time.monotonic()
    now = time.time()
    for count in range(number):
        id = f"job_{count:012d}"
        job = AsyncJob(
            id=id,
            tenant=f"tenant-{count % TENANTS}",
            key_id=None,
            endpoint="/v1/chat/completions",
            lane="P2",
            status="in_progress",
            created_at=now,
            deadline=now + 86_400.0,
            detail=AsyncJobDetail(run_id=id, step_id=id, model="m"),
            size=len(BODY),
        )
        await executor.run(store.create, job, BODY, None, None)
        await queue.add([NewWork(id, job.lane, "m", job.tenant)])
        if time.monotonic() - shown >= PROGRESS_S:
            shown = time.monotonic()
            print(f"{count + 1} of {number} accepted after {shown - began:.0f} s", flush=True)
    return time.monotonic() - began


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
