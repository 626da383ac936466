"""Fields of the calls that stages make, and the values of their answers."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.errors import WorkerLost
from inferry.domain.pooling import read_array
from inferry.pipelines.declaration import EmbedStage, GenerateStage, RankStage

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
_MALFORMED = "the answer of the call is malformed"


class Usage(Struct):
    """Tokens of all calls of a run."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0

    def add(self, other: "Usage") -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.total_tokens += other.total_tokens


class _Embedding(Struct):
    embedding: bytes  # msgspec decodes base64 faster than binascii


class _Embeddings(Struct):
    data: list[_Embedding]
    usage: Usage


class _RankResult(Struct):
    index: int
    relevance_score: float


class _Ranking(Struct):
    results: list[_RankResult]
    usage: Usage


class _Text(Struct, frozen=True):
    content: str | None = None


class _Choice(Struct):
    message: _Text = _Text()


class _Chat(Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None


_embeddings = msgspec.json.Decoder(_Embeddings)
_ranking = msgspec.json.Decoder(_Ranking)
_chat = msgspec.json.Decoder(_Chat)


def embed_fields(stage: EmbedStage, inputs: Sequence[str]) -> dict[str, Any]:
    own = {"model": stage.model, "input": inputs, "encoding_format": "base64"}
    return {**stage.options, **own}


def read_vectors(body: bytes) -> "tuple[list[array[float]], Usage]":
    found = _decode(_embeddings, body)
    try:
        return [read_array(one.embedding) for one in found.data], found.usage
    except ValueError:
        raise WorkerLost(_MALFORMED) from None


def rank_fields(stage: RankStage, query: str, documents: Sequence[str]) -> dict[str, Any]:
    own: dict[str, Any] = {"model": stage.model, "query": query, "documents": documents, "return_documents": False}
    if stage.top is not None:
        own["top_n"] = stage.top
    return {**stage.options, **own}


def read_ranking(body: bytes) -> tuple[list[tuple[int, float]], Usage]:
    found = _decode(_ranking, body)
    return [(one.index, one.relevance_score) for one in found.results], found.usage


def generate_fields(stage: GenerateStage, contents: Sequence[str]) -> dict[str, Any]:
    messages = [{"role": one.role, "content": text} for one, text in zip(stage.messages, contents, strict=True)]
    own: dict[str, Any] = {"model": stage.model, "messages": messages}
    if stage.max_tokens is not None:
        own["max_tokens"] = stage.max_tokens
    if stage.temperature is not None:
        own["temperature"] = stage.temperature
    return {**stage.options, **own}


def read_text(body: bytes) -> tuple[str, Usage]:
    found = _decode(_chat, body)
    return (found.choices[0].message.content or "") if found.choices else "", found.usage or Usage()


def _decode(decoder: "msgspec.json.Decoder[Any]", body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError:
        raise WorkerLost(_MALFORMED) from None
