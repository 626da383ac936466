"""Answers of the pooled APIs: embeddings as OpenAI writes them, the others as vLLM does."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.pooling import Classification, PooledAnswer, decode_answer, decode_vector
from inferry.ingress.wire_format import WireFormat


class PooledFormat(WireFormat):
    """`body` writes the answer of a worker."""

    def full_body(self, job: InferenceJob, answer: "bytes | dict[str, Any]") -> bytes:
        raw = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        try:
            return msgspec.json.encode(self.body(job, decode_answer(raw)))
        except (msgspec.MsgspecError, ValueError):
            raise WorkerLost("the worker sent a malformed answer") from None

    def body(self, job: InferenceJob, answer: PooledAnswer) -> dict[str, Any]:
        raise NotImplementedError


class EmbeddingsFormat(PooledFormat):
    def __init__(self, *, is_base64: bool) -> None:
        self._is_base64 = is_base64

    def body(self, job: InferenceJob, answer: PooledAnswer) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": one if self._is_base64 else decode_vector(str(one))}
            for index, one in enumerate(answer.data)
        ]
        return {"object": "list", "data": data, "model": job.route.model, "usage": _usage(answer)}


class ScoreFormat(PooledFormat):
    def body(self, job: InferenceJob, answer: PooledAnswer) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(answer.data)]
        return {**_head("score", job), "data": data, "usage": _usage(answer)}


class ClassifyFormat(PooledFormat):
    def body(self, job: InferenceJob, answer: PooledAnswer) -> dict[str, Any]:
        data = []
        for index, one in enumerate(answer.data):
            if not isinstance(one, Classification):
                raise ValueError("no classification")
            data.append({"index": index, "label": one.label, "probs": one.probs, "num_classes": len(one.probs)})
        return {**_head("classify", job), "data": data, "usage": _usage(answer)}


class RerankFormat(PooledFormat):
    """Results with the highest score first. `documents`: those to return; None returns none."""

    def __init__(self, documents: Sequence[str] | None, top_n: int) -> None:
        self._documents = documents
        self._top_n = top_n

    def body(self, job: InferenceJob, answer: PooledAnswer) -> dict[str, Any]:
        scores = [float(one) for one in answer.data if not isinstance(one, Classification)]
        ranked = sorted(enumerate(scores), key=lambda result: -result[1])[: self._top_n]
        results = []
        for index, score in ranked:
            document = {} if self._documents is None else {"document": {"text": self._documents[index]}}
            results.append({"index": index, **document, "relevance_score": score})
        return {"id": f"rerank-{job.job_id}", "model": job.route.model, "usage": _usage(answer), "results": results}


def _head(kind: str, job: InferenceJob) -> dict[str, Any]:
    return {"id": f"{kind}-{job.job_id}", "object": "list", "created": int(time.time()), "model": job.route.model}


def _usage(answer: PooledAnswer) -> dict[str, int]:
    tokens = answer.usage.prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}
