"""A gateway with a mock worker whose recorder also gets synthetic attempts.

    python -m benchmarks.recorder_gateway PORT LEDGER

Each line `ARM RATE SECONDS` on standard input makes RATE times SECONDS entries in advance and prints `ready`. The next
line hands them over at that rate: with the arm `beside` to the recorder; with `discarded` they are dropped, so that the
two differ by the recorder's work only. At the end of the input the gateway stops in an orderly way and prints the
recorder's counters.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import uvloop

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.cli.listening import bind
from inferry.domain.clock import SystemClock
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Delta, Done, FinishReason, Usage
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.ingress.http import lifecycle

TICK_S = 0.001
"""Three entries at a time, at 3,000 per second, as calls that end at the same time would."""


class MockWorker:
    """Answers every job with one word, in the next turn of the event loop."""

    name = "mock"

    def __init__(self) -> None:
        self._clock = SystemClock()

    def cards(self) -> Sequence[ModelCard]:
        return [ModelCard(name="m")]

    def view(self) -> WorkerView:
        return WorkerView(
            worker=self.name,
            models=frozenset({"m"}),
            phase=Phase.READY,
            capacity=Capacity(sequences=256),
            observed_at=self._clock.now(),
        )

    async def start(self) -> None: ...

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        await asyncio.sleep(0)
        for job in plan.jobs:
            emit(Delta(job.job_id, job.run_id, job.step_id, 0, "lamp", (1,), 1))
            emit(Done(job.job_id, FinishReason.STOP, Usage(20, 0, 1, 0.001)))

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        return frozenset()

    async def close(self) -> None: ...


def an_entry(number: int) -> LedgerEntry:
    return LedgerEntry(
        # Two gateways on one database: a row that is there already is not written again.
        job_id=f"synthetic-{os.getpid()}-{number}",
        attempt=1,
        tenant=f"tenant-{number % 50}",
        run_id=f"run-{number // 20}",
        step_id=f"step-{number % 20}",
        model="m",
        lane="P2",
        outcome=Outcome.DONE,
        ended_at=time.time(),
        prompt_tokens=1200,
        cached_tokens=800,
        output_tokens=150,
        gpu_seconds=0.02,
        queue_ms=12.5,
        first_token_ms=80.0,
        total_ms=900.0,
        batch_size=8,
        worker="mock",
        finish="stop",
        request_id=f"req-{number}",
        cost_nanos=1_234_567,
        attained=True,
    )


async def hand_over(entries: list[LedgerEntry], rate: float, take: Callable[[LedgerEntry], None]) -> None:
    """Give entries away at a fixed rate, the last ones first, whatever the loop's delays."""
    began, total = time.monotonic(), len(entries)
    while entries:
        left = max(0, total - round(rate * (time.monotonic() - began)))
        while len(entries) > left:
            take(entries.pop())
        await asyncio.sleep(TICK_S)


def discard(entry: LedgerEntry) -> None:
    """Nothing: the entry was taken from the list, as `record` would have got it."""


async def main(port: int, ledger: str) -> None:
    service = wiring.assemble(parse({"ledger": ledger}), [MockWorker()], {}, SystemClock())
    recorder = service.gateway._recorder
    service.start()
    lifecycle.tune_interpreter()
    stop = lifecycle.StopSignals()
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)

    async def follow() -> None:
        made = 0
        while line := await commands.readline():
            arm, rate, seconds = line.decode().split()
            number = round(float(rate) * float(seconds))
            entries = [an_entry(made + one) for one in range(number)]
            made += number
            gc.freeze()  # as objects that exist from the start, they are no work for the collector
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await commands.readline()
            await hand_over(entries, float(rate), recorder.record if arm == "beside" else discard)
        stop.request()

    following = asyncio.create_task(follow())
    sock = bind("127.0.0.1", port, 1).sockets[0]
    await lifecycle.serve(service.app, service.gateway, sock, stop, idle_timeout_s=75.0, drain_timeout_s=30.0)
    await following
    await service.close()
    found = {name: getattr(recorder, name) for name in ("accepted", "written", "dropped")}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), sys.argv[2]))
