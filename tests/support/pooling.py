"""Pooled jobs, and a server that embeds, scores and classifies like vLLM."""

import base64
import struct
from typing import Any, Literal
from zlib import crc32

from aiohttp import web
from msgspec import json

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, PooledInputs
from inferry.domain.pooling import decode_answer, decode_vector
from inferry.domain.routes import BatchKey, RouteKey, Task
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Item
from inferry.domain.values import replace
from support.builders import a_job
from support.upstream import Upstream

_APIS: dict[Task, Literal["embeddings", "score", "classify"]] = {
    Task.EMBED: "embeddings",
    Task.SCORE: "score",
    Task.CLASSIFY: "classify",
}
REFUSED = "refused"
"""The server refuses every request with this input."""


def vector_of(text: Any) -> list[float]:
    """What the server makes of an input: three numbers that are exact in float32."""
    checksum = crc32(str(text).encode())
    return [float(checksum & 0xFFF), float(checksum >> 12 & 0xFFF), 0.5]


def score_of(a: str, b: str) -> float:
    return crc32(f"{a}|{b}".encode()) % 1000 / 1000


def probs_of(text: Any) -> list[float]:
    first = crc32(str(text).encode()) % 64 / 64
    return [first, 1 - first]


def label_of(text: Any) -> str:
    first, second = probs_of(text)
    return "low" if first >= second else "high"


def tokens_of(text: Any) -> int:
    return len(text)


async def pools(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As vLLM answers: a token for every character, or every id."""
    if request.path.endswith("/score"):
        first, second = _listed(body["text_1"]), _listed(body["text_2"])
        pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        data: list[Any] = [
            {"index": index, "object": "score", "score": score_of(*pair)} for index, pair in enumerate(pairs)
        ]
        tokens = sum(tokens_of(a) + tokens_of(b) for a, b in pairs)
    else:
        inputs = _listed(body["input"])
        if REFUSED in inputs:
            return web.json_response({"error": {"message": "refused", "type": "BadRequestError"}}, status=400)
        data = [
            {"index": index, "label": label_of(one), "probs": probs_of(one), "num_classes": 2}
            if request.path == "/classify"
            else {"index": index, "object": "embedding", "embedding": _encoded(vector_of(one), body)}
            for index, one in enumerate(inputs)
        ]
        tokens = sum(tokens_of(one) for one in inputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return web.json_response({"id": "p", "object": "list", "data": data, "model": "m", "usage": usage})


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value


def _encoded(vector: list[float], body: dict[str, Any]) -> Any:
    packed = struct.pack(f"<{len(vector)}f", *vector)
    return base64.b64encode(packed).decode() if body.get("encoding_format") == "base64" else vector


def an_embedding(job_id: str, *inputs: Any, tenant: str = "a", group: str | None = None, **more: Any) -> InferenceJob:
    return _pooled(job_id, Task.EMBED, {"input": list(inputs)}, len(inputs), tenant, group, **more)


def a_classification(job_id: str, *inputs: Any) -> InferenceJob:
    return _pooled(job_id, Task.CLASSIFY, {"input": list(inputs)}, len(inputs), "a", None)


def a_score(job_id: str, first: list[str], second: list[str], tenant: str = "a") -> InferenceJob:
    return _pooled(job_id, Task.SCORE, {"text_1": first, "text_2": second}, len(second), tenant, None)


def _pooled(
    job_id: str, task: Task, lists: dict[str, Any], count: int, tenant: str, group: str | None, **more: Any
) -> InferenceJob:
    route = RouteKey("m", pooled=True)
    tokens = sum(tokens_of(one) for items in lists.values() for one in items)
    none = Estimate.exactly(0)
    return replace(
        a_job(job_id, tenant=tenant),
        route=route,
        batch_key=BatchKey(route, task=task, group=tenant if group is None else group),
        footprint=Footprint(Estimate.exactly(tokens), none, none),
        token_budget=0,
        payload=Payload(
            api=_APIS[task],
            body=json.encode({"model": "m", **lists, **more}),
            sampling=Sampling(temperature=0.0, max_tokens=0),
            output_limit=0,
            non_streaming=True,
            pooled=PooledInputs(count),
        ),
    )


def answers(items: list[Item]) -> dict[str, list[Any]]:
    """The results by job: vectors, scores or classifications."""
    found: dict[str, list[Any]] = {}
    for item in items:
        if isinstance(item, Delta):
            data = decode_answer(item.raw).data
            found[item.job_id] = [decode_vector(one) if isinstance(one, str) else one for one in data]
    return found
