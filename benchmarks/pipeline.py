"""Retrieval with 200 clients at once: one pipeline per question, against clients that call every stage themselves.

A question has 48 short passages of its own. The embedded engine embeds the question and the passages, the passages are
ranked by cosine, and the engine generates an answer of at most 8 tokens from the best two. No two texts are equal, so
that no call shares the result of another. Each client asks its next question when it has the answer of the one before.

- `by_item`: a stage-by-stage client without batching: one call for each text, one after another, ranking in the client.
- `by_stage`: a stage-by-stage client that sends all passages in one call.
- `pipeline`: one call of the pipeline.

Three workers: `server` is a model of a GPU server over HTTP: one request at a time, 5 ms for a pass and 0.02 ms
for each text, and 20 ms for an answer. `one_layer` is the embedded engine with the first layer of the bundled model.
Its engine is busy all the time. The gateway computes the texts of all clients together in every arm, so that a busy
engine leaves little to gain. `bundled` is the whole bundled model, for equality and cancels.

Wanted: the pipeline has at least twice the throughput of `by_item`. `is_twice_by_item` says for each worker whether it
has. Before the embedded engine on two CPU cores it has not, with 16 and with 48 passages and with either model, because
the engine is busy in all arms. The modelled `server` was added for that reason, after those runs. It computes nothing.
Passages and answers are compared with those of the stages called by hand. Arms alternate in every round. Clients,
gateway and engine share the machine's cores, so that ratios count. CPU time of the gateway's process and of the
clients', by question, depends less on what else the machine does. With an embedded engine it contains the engine's.

`cancel`: a pipeline of the bundled model that is in a long stage is cancelled with its run. Measured: the time until
the engine has confirmed that it has freed all of it, and the time until the client has its answer. Required: 250 ms for
both, in every stage.
"""

import asyncio
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from aiohttp import web
from safetensors.torch import load_file, save_file

from benchmarks.serving import cpu_seconds, free_port, run_gateway, run_process
from inferry.domain.pooling import decode_vector, encode_vector
from inferry.engine.bundled import BUNDLED_DIRECTORY

CLIENTS = 200
QUESTIONS = 1
PASSAGES = 48
ROUNDS = 3
CANCELS = 5
MIN_RATIO = 2.0
MAX_CANCEL_MS = 250.0
PASS_S, TEXT_S, ANSWER_S = 0.005, 0.00002, 0.02
MODEL = "inferry-triage"
_TOPICS = ("invoice", "parcel", "password", "refund", "account", "delivery", "payment", "login")

_EMBED = {"kind": "embed", "model": MODEL}
_ANSWER: dict[str, Any] = {"kind": "generate", "model": MODEL, "max_tokens": 8, "temperature": 0}
_PROMPT = "Classify this ticket: {{ context }} {{ input.question }}"


def _retrieval(passages: dict[str, Any]) -> dict[str, Any]:
    return {
        "inputs": {"question": {}, "passages": {"type": "list[text]"}},
        "stages": {
            "query": {**_EMBED, "input": "{{ input.question }}"},
            "vectors": passages,
            "best": {
                "kind": "rank",
                "query": "{{ query }}",
                "vectors": "{{ vectors }}",
                "documents": "{{ input.passages }}",
                "top": 2,
            },
            "context": {"kind": "join", "items": "{{ best.text }}", "separator": " "},
            "answer": {**_ANSWER, "messages": [{"content": _PROMPT}]},
        },
    }


_LONG = {"kind": "generate", "model": MODEL, "max_tokens": 400, "options": {"ignore_eos": True}}
_MANY = {"inputs": {"texts": {"type": "list[text]"}}}
_EACH = {"kind": "map", "over": "{{ input.texts }}"}
PIPELINES: dict[str, Any] = {
    "pipeline": _retrieval({**_EMBED, "input": "{{ input.passages }}"}),
    "embed": {**_MANY, "stages": {"s": {**_EMBED, "input": "{{ input.texts }}"}}},
    "rank": {
        **_MANY,
        "stages": {
            "s": {"kind": "rank", "model": MODEL, "query": "{{ input.texts.0 }}", "documents": "{{ input.texts }}"}
        },
    },
    "map": {**_MANY, "stages": {"s": {**_EACH, "stages": {"one": {**_LONG, "messages": [{"content": "{{ item }}"}]}}}}},
    "generate": {**_MANY, "stages": {"s": {**_LONG, "messages": [{"content": "{{ input.texts.0 }}"}]}}},
    "function": {
        **_MANY,
        "stages": {"s": {"kind": "function", "function": "benchmarks.pipeline:wait", "arguments": {}}},
    },
}


async def wait() -> None:
    """A function that never returns."""
    await asyncio.Event().wait()


LONG_STAGES = ("embed", "rank", "map", "generate", "function")
WORKER = {"kind": "embedded", "name": "own", "models": [MODEL], "max_sequences": 256}
CONFIG = {"pipelines": PIPELINES, "ledger": "sqlite:///:memory:"}


class Connection:
    """A keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26))

    async def send(self, method: str, path: str, body: Any = None, run: str = "") -> tuple[int, Any]:
        raw = b"" if body is None else json.dumps(body).encode()
        named = f"x-inferry-run-id: {run}\r\n" if run else ""
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n{named}\r\n"
        self._writer.write(head.encode() + raw)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1]), json.loads(await self._reader.readexactly(int(headers["content-length"])))

    async def post(self, path: str, body: Any) -> Any:
        status, answer = await self.send("POST", path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer}")
        return answer

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Vectors as OpenAI's client asks for them."""
        answer = await self.post("/v1/embeddings", {"model": MODEL, "input": texts, "encoding_format": "base64"})
        return [decode_vector(one["embedding"]) for one in answer["data"]]

    def close(self) -> None:
        self._writer.close()


def _texts(arm: str, number: int) -> tuple[str, list[str]]:
    """The question and the passages of a call, all different."""
    passages = [f"{_TOPICS[index % 8]} {arm}{number * PASSAGES + index}" for index in range(PASSAGES)]
    return f"{_TOPICS[number % 8]} question {arm}{number}", passages


async def _by_hand(
    connection: Connection, question: str, passages: list[str], *, together: bool
) -> tuple[str, list[str]]:
    (query,) = await connection.embed([question])
    if together:
        vectors = await connection.embed(passages)
    else:
        vectors = [(await connection.embed([text]))[0] for text in passages]
    scores = [math.fsum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
    best = [passages[index] for index in sorted(range(len(scores)), key=lambda index: -scores[index])[:2]]
    prompt = f"Classify this ticket: {' '.join(best)} {question}"
    fields = {key: value for key, value in _ANSWER.items() if key != "kind"}
    answer = await connection.post(
        "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": prompt}]}
    )
    return answer["choices"][0]["message"]["content"], best


async def _by_pipeline(connection: Connection, name: str, question: str, passages: list[str]) -> None:
    await connection.post(f"/v1/pipelines/{name}", {"input": {"question": question, "passages": passages}})


Ask = Callable[[Connection, str, list[str]], Awaitable[Any]]
ARMS: dict[str, Ask] = {
    "by_item": lambda one, question, texts: _by_hand(one, question, texts, together=False),
    "by_stage": lambda one, question, texts: _by_hand(one, question, texts, together=True),
    "pipeline": lambda one, question, texts: _by_pipeline(one, "pipeline", question, texts),
}


async def _round(port: int, gateway: int, arm: str, round_number: int) -> dict[str, float]:
    connections = [await Connection.open(port) for _ in range(CLIENTS)]
    ask, durations = ARMS[arm], []

    async def client(number: int, connection: Connection) -> None:
        for index in range(QUESTIONS):
            began = time.perf_counter()
            question, passages = _texts(f"{list(ARMS).index(arm)}{round_number}x", number * QUESTIONS + index)
            await ask(connection, question, passages)
            durations.append(time.perf_counter() - began)

    began, of_gateway, of_clients = time.perf_counter(), cpu_seconds(gateway), time.process_time()
    await asyncio.gather(*(client(number, one) for number, one in enumerate(connections)))
    took = time.perf_counter() - began
    of_gateway, of_clients = cpu_seconds(gateway) - of_gateway, time.process_time() - of_clients
    for connection in connections:
        connection.close()
    return {
        "pipelines_per_s": CLIENTS * QUESTIONS / took,
        "p50_ms": 1000 * statistics.median(durations),
        "p95_ms": 1000 * statistics.quantiles(durations, n=20)[-1],
        "gateway_cpu_us": 1e6 * of_gateway / len(durations),
        "client_cpu_us": 1e6 * of_clients / len(durations),
    }


async def _differences(port: int, count: int = 20) -> dict[str, int]:
    """Questions whose best passages, and whose answers, differ between the pipeline and the stages called by hand."""
    connection = await Connection.open(port)
    passages = answers = 0
    for number in range(count):
        question, texts = _texts("equal", number)
        by_hand = await _by_hand(connection, question, texts, together=False)
        body = {"input": {"question": question, "passages": texts}, "include_stages": True}
        found = await connection.post("/v1/pipelines/pipeline", body)
        answers += by_hand[0] != found["output"]
        passages += by_hand[1] != [one["text"] for one in found["stages"]["best"]]
    connection.close()
    return {"questions": count, "different_passages": passages, "different_answers": answers}


async def _cancel(port: int, stage: str, number: int) -> tuple[float, float]:
    """Milliseconds until the engine has confirmed, and until the client has its answer."""
    client, canceller = await Connection.open(port), await Connection.open(port)
    run = f"{stage}-{number}"
    texts = [f"{run} {index} " + "a long text about an invoice " * 8 for index in range(64 if stage == "map" else 400)]
    call = asyncio.create_task(client.send("POST", f"/v1/pipelines/{stage}", {"input": {"texts": texts}}, run))
    while stage != "function":
        status, report = await canceller.send("GET", f"/v1/runs/{run}")
        if status == 200 and report["status"] == "active":
            break
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.05)
    began = time.perf_counter()
    deletion = asyncio.create_task(canceller.send("DELETE", f"/v1/runs/{run}"))
    status, _ = await call
    answered = time.perf_counter()
    status_deleted, report = await deletion
    confirmed = time.perf_counter()
    if status != 409 or status_deleted != 200:
        raise RuntimeError(f"{stage}: {status}, {status_deleted} {report}")
    client.close()
    canceller.close()
    return 1000 * (confirmed - began), 1000 * (answered - began)


async def _compare(port: int, gateway: int, arms: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    equal = await _differences(port)
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            found[arm].append(await _round(port, gateway, arm, number))
            print(arm, {key: round(value, 1) for key, value in found[arm][-1].items()}, flush=True)
    medians = {
        arm: {key: round(statistics.median(one[key] for one in rounds), 1) for key in rounds[0]}
        for arm, rounds in found.items()
    }
    base = medians["pipeline"]["pipelines_per_s"]
    ratios = {arm: round(base / one["pipelines_per_s"], 2) for arm, one in medians.items() if arm != "pipeline"}
    cpu = {arm: one["gateway_cpu_us"] + one["client_cpu_us"] for arm, one in medians.items()}
    return {
        "equal_to_stages_by_hand": equal,
        "medians": medians,
        "pipeline_over": ratios,
        "cpu_of_pipeline_over": {arm: round(cpu["pipeline"] / one, 2) for arm, one in cpu.items() if arm != "pipeline"},
        "rounds": found,
    }


async def _cancels(port: int) -> dict[str, dict[str, float]]:
    found = {}
    for stage in LONG_STAGES:
        times = [await _cancel(port, stage, number) for number in range(CANCELS)]
        found[stage] = {
            "confirmed_ms_p50": round(statistics.median(one for one, _ in times), 1),
            "confirmed_ms_max": round(max(one for one, _ in times), 1),
            "answered_ms_max": round(max(one for _, one in times), 1),
        }
        print(stage, found[stage], flush=True)
    return found


async def serve_model(port: int) -> None:
    """The model of a GPU server."""
    computing = asyncio.Lock()

    async def embeddings(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        async with computing:
            await asyncio.sleep(PASS_S + TEXT_S * len(texts))
        angles = [math.pi * crc32(text.encode()) / 2**32 for text in texts]
        vectors = [encode_vector([math.cos(angle), math.sin(angle)]) for angle in angles]
        data = [{"index": index, "object": "embedding", "embedding": one} for index, one in enumerate(vectors)]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return web.json_response({"object": "list", "data": data, "model": MODEL, "usage": usage})

    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        await asyncio.sleep(ANSWER_S)
        choice = {"index": 0, "delta": {"role": "assistant", "content": "billing"}, "finish_reason": "stop"}
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        usage = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
        events = [{**head, "choices": [choice]}, {**head, "choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return web.Response(text=body, content_type="text/event-stream")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def _before_server() -> dict[str, Any]:
    port = free_port()
    worker = {"kind": "vllm", "name": "up", "url": f"http://127.0.0.1:{port}", "tasks": ["embed", "generate"]}
    config = {**CONFIG, "workers": [{**worker, "capacity": "fixed", "max_sequences": 1024}]}
    model = [sys.executable, "-m", "benchmarks.pipeline", str(port)]
    with run_process(model, quiet=True), run_gateway(config) as (own, gateway):
        return asyncio.run(_compare(own, gateway.pid, list(ARMS), ROUNDS))


@contextmanager
def _one_layer() -> Iterator[str]:
    """A directory with the first layer of the bundled model."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "one-layer"
        shutil.copytree(BUNDLED_DIRECTORY, directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
        weights = load_file(directory / "model.safetensors")
        kept = {key: value for key, value in weights.items() if ".layers." not in key or ".layers.0." in key}
        save_file(kept, directory / "model.safetensors", {"format": "pt"})
        yield str(directory)


def measure() -> dict[str, Any]:
    server = _before_server()
    own = {**CONFIG, "workers": [WORKER]}
    with _one_layer() as directory:
        reduced = {**CONFIG, "workers": [{**WORKER, "model": directory}]}
        with run_gateway(reduced) as (port, gateway):
            small = asyncio.run(_compare(port, gateway.pid, list(ARMS), ROUNDS))
    with run_gateway(own) as (port, _):
        cancels = asyncio.run(_cancels(port))
        equal = asyncio.run(_differences(port))
    found = [equal, *(one["equal_to_stages_by_hand"] for one in (server, small))]
    return {
        "clients": CLIENTS,
        "passages": PASSAGES,
        "server": server,
        "one_layer": small,
        "bundled": {"equal_to_stages_by_hand": equal, "cancel": cancels},
        "is_equal_to_stages_by_hand": not any(
            one[key] for one in found for key in ("different_passages", "different_answers")
        ),
        "is_twice_by_item": {
            name: one["pipeline_over"]["by_item"] >= MIN_RATIO
            for name, one in (("server", server), ("one_layer", small))
        },
        "is_cancelled_within_250_ms": all(
            max(one["confirmed_ms_max"], one["answered_ms_max"]) <= MAX_CANCEL_MS for one in cancels.values()
        ),
    }


if __name__ == "__main__":
    asyncio.run(serve_model(int(sys.argv[1])))
