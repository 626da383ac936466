"""What an event costs in the Messages API beside chat completions, in microseconds.

`response` is the job's stream and the response alone. `gateway` is the path of an event from the upstream's bytes to
the reply: the scan, the job's lifecycle with its subscribers, the stream and the response. `connection` is the
processor time of the same path with a turn of the event loop and the write to a client's socket for every event; the
read from the upstream's socket is missing. Most events are text; reasoning and arguments of tools are measured too.

`python -m benchmarks.messages` prints the table; `measure` returns the same numbers.
"""

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvloop

from benchmarks import uncompiled
from inferry.cli import wiring
from inferry.cli.checkout import is_compiled
from inferry.cli.config.loader import parse
from inferry.cli.listening import bind
from inferry.dispatch.gateway import Gateway
from inferry.domain.attempts import Attempt
from inferry.domain.callers import ANONYMOUS
from inferry.domain.clock import SystemClock
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload
from inferry.domain.lanes import Lane
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, FinishReason, Usage
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.http import lifecycle
from inferry.ingress.http.request import Request
from inferry.ingress.internal_call import InternalReply, call
from inferry.ingress.response import HeartbeatTimer, StreamingResponse
from inferry.ingress.wire_format import OPENAI, WireFormat
from inferry.streams.mailbox import JobStream, MergeCounter
from inferry.workers.openai_http.sse import EventScanner

EVENTS = 2_000
ROUNDS = 40
MAX_RATIO = 1.3
FORMATS: dict[str, WireFormat] = {"chat": OPENAI, "messages": MessagesFormat()}
PATHS = {"chat": b"/v1/chat/completions", "messages": b"/v1/messages"}
KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "text": lambda text: {"content": text},
    "reasoning": lambda text: {"reasoning": text},
    "arguments": lambda text: {"tool_calls": [{"index": 0, "function": {"arguments": text}}]},
}
TOOL_CALL = {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f"}}]}


class EventWorker:
    """Delivers `events` for every job and notes how long that took in `seconds`.

    With `yields` every event has a turn of the event loop, and `seconds` is processor time.
    """

    name = "events"

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.seconds = 0.0
        self.yields = False
        self._clock = SystemClock()

    def cards(self) -> Sequence[ModelCard]:
        return [ModelCard(name="m", features=frozenset({"tools"}))]

    def view(self) -> WorkerView:
        return WorkerView(
            worker=self.name,
            models=frozenset({"m"}),
            phase=Phase.READY,
            capacity=Capacity(sequences=8),
            observed_at=self._clock.now(),
        )

    async def start(self) -> None: ...

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        for job in plan.jobs:
            scan = EventScanner().scan
            start_cpu = time.thread_time()
            with timed() as seconds:
                for index, received in enumerate(self.events):
                    raw, tokens = scan(received)
                    emit(Delta(job.job_id, job.run_id, job.step_id, index, "", (), tokens, raw))
                    if self.yields:
                        await asyncio.sleep(0)
            self.seconds = time.thread_time() - start_cpu if self.yields else seconds[0]
            emit(Done(job.job_id, FinishReason.STOP, Usage(50, 0, len(self.events))))

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        return frozenset()

    async def close(self) -> None: ...


@contextmanager
def timed() -> Iterator[list[float]]:
    """A list to which the seconds within the block are appended. The garbage collector is off."""
    found: list[float] = []
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    yield found
    found.append(time.perf_counter() - start)
    gc.enable()


def measure() -> dict[str, Any]:
    """The fastest of many alternating rounds, compiled if this package is, and as plain Python."""
    result: dict[str, Any] = {"events": EVENTS, "rounds": ROUNDS, "max_ratio": MAX_RATIO}
    result["us_per_event"] = figures()
    if is_compiled():
        result["us_per_event_plain_python"] = uncompiled.call_uncompiled("benchmarks.messages", "figures")
    return result


def figures() -> dict[str, dict[str, float]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_figures())


async def _figures() -> dict[str, dict[str, float]]:
    worker = EventWorker()
    service = wiring.assemble(parse({"ledger": "sqlite:///:memory:"}), [worker], {}, SystemClock())
    worker.events = [_chunk({"content": "ready"})]
    service.start()
    sock, stop = bind("127.0.0.1", 0, 1).sockets[0], lifecycle.StopSignals()
    server = asyncio.create_task(
        lifecycle.serve(service.app, service.gateway, sock, stop, idle_timeout_s=60.0, drain_timeout_s=5.0)
    )
    found: dict[str, dict[str, float]] = {}
    try:
        while not service.gateway.is_ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for kind, delta in KINDS.items():
            worker.events = [_chunk(TOOL_CALL)] if kind == "arguments" else []
            worker.events += [_chunk(delta(f" word{number}")) for number in range(EVENTS)]
            response: dict[str, list[float]] = {name: [] for name in FORMATS}
            gateway: dict[str, list[float]] = {name: [] for name in FORMATS}
            connection: dict[str, list[float]] = {name: [] for name in FORMATS}
            for _ in range(ROUNDS):
                for name, wire_format in FORMATS.items():
                    response[name].append(_run_response(service.gateway, worker.events, wire_format))
                    gateway[name].append(await _run_gateway(service, worker, PATHS[name]))
                    connection[name].append(await _run_connection(sock.getsockname()[1], worker, PATHS[name]))
            found[f"{kind}, response"] = _row(response)
            found[f"{kind}, gateway"] = _row(gateway)
            found[f"{kind}, connection"] = _row(connection)
    finally:
        stop.request()
        await server
        await service.close()
    return found


def _row(seconds: dict[str, list[float]]) -> dict[str, float]:
    best = {name: min(times) for name, times in seconds.items()}
    micros = {name: round(time / EVENTS * 1e6, 3) for name, time in best.items()}
    return micros | {"ratio": round(best["messages"] / best["chat"], 2)}


REQUEST = b'{"model":"m","messages":[{"role":"user","content":"Go."}],"max_tokens":%d,"stream":true}' % (2 * EVENTS)


async def _run_gateway(service: wiring.Service, worker: EventWorker, path: bytes) -> float:
    answer = await call(service.app.serve, path, REQUEST, {}, ANONYMOUS)
    assert answer.status == 200, answer.body
    return worker.seconds


async def _run_connection(port: int, worker: EventWorker, path: bytes) -> float:
    worker.yields = True
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (path, len(REQUEST))
    await asyncio.to_thread(_read_all, port, head + REQUEST)
    worker.yields = False
    return worker.seconds


def _read_all(port: int, request: bytes) -> None:
    """One call over a socket, in a thread: its processor time is not counted."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(request)
        while sock.recv(1 << 20):
            time.sleep(0.002)


def _run_response(gateway: Gateway, events: list[bytes], wire_format: WireFormat) -> float:
    job = _job()
    stream = JobStream(Attempt(job), MergeCounter())
    reply = InternalReply(Request(b"POST", b"/", {}), asyncio.get_running_loop().create_future())
    StreamingResponse(stream, job, gateway, reply, wire_format, HeartbeatTimer(60.0), 1 << 30).start()
    with timed() as seconds:
        for index, raw in enumerate(events):
            stream.push(Delta(job.job_id, job.run_id, job.step_id, index, "", (), 1, raw))
    stream.finish(Done(job.job_id, FinishReason.STOP, Usage(50, 0, len(events))))
    return seconds[0]


def _chunk(delta: dict[str, Any]) -> bytes:
    """A chunk as vLLM writes it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
    head = {"id": "chatcmpl-5a1c6c5e7be54b1b", "object": "chat.completion.chunk", "created": 1763280000, "model": "m"}
    return b"data: " + json.dumps(head | {"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def _job() -> InferenceJob:
    route = RouteKey("m")
    return InferenceJob(
        job_id="job",
        tenant="t",
        run_id="run",
        step_id="step",
        lane=Lane.P1,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(Estimate.exactly(50), Estimate.exactly(0), Estimate.exactly(EVENTS)),
        token_budget=EVENTS,
        prompt_hash="",
        arrived_at=0.0,
        max_wait_s=0.0,
        stream=True,
        payload=Payload(api="chat", body=b"{}", sampling=Sampling()),
    )


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
