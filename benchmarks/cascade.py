"""A cascade of two models with known answers: the small one's share, agreement against the promise, and cost.

The small model is the bundled `inferry-triage` with its real log probabilities, computed by transformers behind an
OpenAI-compatible server. The large one knows the intent of every ticket and has a higher price. The threshold is chosen
by the rule of `inferry cascade tune` from one set of held-out tickets and checked on another, through the gateway.
Goal: at least 60 % of calls answered by the small model at the agreement that the threshold promises.
"""

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import torch
import transformers
from aiohttp import web

from benchmarks.serving import free_port, run_gateway
from inferry.domain.proportions import choose_threshold, exact_lower, wilson
from inferry.domain.reports import ReportQuery, as_json
from inferry.engine.bundled import BUNDLED_DIRECTORY
from inferry.engine.tokenizer import HfTokenizer
from inferry.ledger.stores.opening import open_queries
from inferry.pipelines.answers import meaning
from training.triage.documents import Document, make_task

PROMISE = 0.97
GOAL_SHARE = 0.6
CHOSEN_FROM, CHECKED_ON = 1_500, 1_000
SEEDS = (75, 76)
CONCURRENT = 8
MAX_TOKENS = 12
PRICES = {"small": {"input": 0.05, "output": 0.20}, "large": {"input": 1.00, "output": 4.00}}


def measure(chosen_from: int = CHOSEN_FROM, checked_on: int = CHECKED_ON) -> dict[str, Any]:
    first, second = (_documents(seed, count) for seed, count in zip(SEEDS, (chosen_from, checked_on), strict=True))
    known = {_asked(one): one.messages[-1].content for one in (*first, *second)}
    with tempfile.TemporaryDirectory() as name, Models(known) as models:
        pairs = _shadowed(models, first, Path(name) / "chosen.db")
        threshold = choose_threshold(pairs, PROMISE)
        assert threshold is not None, "the promise cannot be made"
        checked = _checked(models, second, threshold.score, Path(name) / "checked.db")
    return {
        "prices_per_million": PRICES,
        "promise": PROMISE,
        "chosen_on": {
            "calls": len(pairs),
            "agreement_of_all": round(sum(agreed for _, agreed in pairs) / len(pairs), 4),
            "threshold": threshold._asdict(),
        },
        "checked_on": checked,
        "goal_share": GOAL_SHARE,
        "meets_goal": checked["small_share"] >= GOAL_SHARE and checked["agreement"] >= PROMISE,
    }


def _documents(seed: int, count: int) -> list[Document]:
    random = Random(seed)
    return [make_task(random, "classify", "held") for _ in range(count)]


def _asked(document: Document) -> str:
    return json.dumps([{"role": one.role, "content": one.content} for one in document.messages[:-1]])


def _config(models: "Models", threshold: float, shadow: float, ledger: Path) -> dict[str, Any]:
    cascade = {"small": "small", "large": "large", "accept": {"min_mean_logprob": threshold}, "shadow": shadow}
    worker = {"name": "models", "kind": "openai", "url": models.url, "models": ["small", "large"], "max_sequences": 64}
    return {
        "workers": [worker],
        "cascades": {"cascade": cascade},
        "prices": PRICES,
        "ledger": f"sqlite:///{ledger}",
    }


def _shadowed(models: "Models", documents: Sequence[Document], ledger: Path) -> list[tuple[float, bool]]:
    """Score and agreement of every call, as a cascade that compares all calls records them."""
    with run_gateway(_config(models, -1e9, 1.0, ledger)) as (port, _):
        asyncio.run(_ask(port, documents))
        asyncio.run(_until_rows(ledger, len(documents)))
        with open_queries(f"sqlite:///{ledger}") as queries:
            return queries.score_pairs("cascade", 0.0)


def _checked(models: "Models", documents: Sequence[Document], threshold: float, ledger: Path) -> dict[str, Any]:
    with run_gateway(_config(models, threshold, 0.02, ledger)) as (port, _):
        started = time.perf_counter()
        answers = asyncio.run(_ask(port, documents))
        took_s = time.perf_counter() - started
        asyncio.run(_until_rows(ledger, len(documents)))
    with open_queries(f"sqlite:///{ledger}") as queries:
        report = as_json(queries.report("composed", ReportQuery(since=0.0, until=2e9)))["rows"][0]
    expected = [one.messages[-1].content for one in documents]
    same = [_meaning(text) == _meaning(right) for (_, text), right in zip(answers, expected, strict=True)]
    by_small = [is_same for (path, _), is_same in zip(answers, same, strict=True) if path == "small"]
    small, agreed = len(by_small), sum(by_small)
    return {
        "calls": len(documents),
        "failed": sum(not text for _, text in answers),
        "small_share": round(small / len(documents), 4),
        "small_share_interval": [round(end, 4) for end in wilson(small, len(documents))],
        "agreement": round(agreed / small, 4),
        "agreement_interval": [round(end, 4) for end in wilson(agreed, small)],
        "agreement_lower_bound": round(exact_lower(agreed, small), 4),
        "right_overall": round(sum(same) / len(same), 4),
        "cost_against_large_only": round(report["cost"] / report["cost_large_only"], 4),
        "report": report,
        "seconds": round(took_s, 1),
    }


def _meaning(text: str) -> object:
    """What the gateway compares for agreement."""
    return meaning({"message": {"content": text}})


async def _ask(port: int, documents: Sequence[Document]) -> list[tuple[str, str]]:
    """Path and text of every answer."""
    slots = asyncio.Semaphore(CONCURRENT)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    async def ask(document: Document) -> tuple[str, str]:
        body = {"model": "cascade", "messages": json.loads(_asked(document)), "max_tokens": MAX_TOKENS}
        async with slots, http.post(url, json={**body, "temperature": 0}) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return response.headers["x-inferry-path"], answer["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        return await asyncio.gather(*map(ask, documents))


async def _until_rows(ledger: Path, count: int) -> None:
    """Until the row of every call is written: of compared calls that is after the comparison."""
    async with asyncio.timeout(300):
        while True:
            with open_queries(f"sqlite:///{ledger}") as queries:
                rows = as_json(queries.report("composed", ReportQuery(since=0.0, until=2e9)))["rows"]
            if rows and rows[0]["calls"] == count:
                return
            await asyncio.sleep(0.2)


class Models:
    """Both models on one server, on a thread."""

    def __init__(self, known: dict[str, str]) -> None:
        self._known = known
        self._port = free_port()
        self._tokenizer = HfTokenizer(BUNDLED_DIRECTORY)
        torch.set_num_threads(1)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_DIRECTORY, dtype=torch.float32).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "Models":
        self._thread.start()
        assert self._started.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        models = [{"id": name, "object": "model", "created": 1, "owned_by": "benchmark"} for name in PRICES]
        return web.json_response({"object": "list", "data": models})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        messages = body.get("messages") or [{"role": "user", "content": str(body.get("prompt"))}]
        ids = self._tokenizer.encode_chat(messages)
        if body["model"] == "large":
            text = self._known.get(json.dumps(messages), "other")
            tokens = [(one, 0.0) for one in self._tokenizer.encode(text)]
        else:
            tokens = await asyncio.to_thread(self._generate, ids, body.get("max_tokens") or MAX_TOKENS)
            text = self._tokenizer.decode([one for one, _ in tokens if one not in self._ends])
        listed: list[dict[str, Any]] = [
            {"token": str(one), "logprob": value, "bytes": None, "top_logprobs": []} for one, value in tokens
        ]
        logprobs = {"content": listed} if body.get("logprobs") else None
        head = {"id": "x", "created": 1, "model": body["model"], "object": "chat.completion.chunk"}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens), "total_tokens": len(ids) + len(tokens)}
        if not body.get("stream"):
            message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return web.json_response({**head, "object": "chat.completion", "choices": [message], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for one in ({**head, "choices": [choice]}, {**head, "choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(one).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _generate(self, ids: list[int], max_tokens: int) -> list[tuple[int, float]]:
        """Greedy tokens with their log probabilities, the end token included."""
        found: list[tuple[int, float]] = []
        with torch.inference_mode():
            given, past = torch.tensor([ids]), None
            while len(found) < max_tokens:
                out = self._model(given, past_key_values=past, use_cache=True)
                past = out.past_key_values
                values = torch.log_softmax(out.logits[0, -1].double(), -1)
                token = int(values.argmax())
                found.append((token, float(values[token])))
                if token in self._ends:
                    break
                given = torch.tensor([[token]])
        return found
