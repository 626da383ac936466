"""Bodies of the pooled APIs, validated and brought into one form.

The body that workers get has lists only: `text_1` and `text_2` for scores, `input` for the others. A rerank request
becomes the score of its query with every document.
"""

from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from inferry.domain.errors import InvalidRequest
from inferry.domain.routes import Task
from inferry.ingress.openai.decode import MAX_TOKEN_ID, decode_body
from inferry.ingress.pooling.formats import ClassifyFormat, EmbeddingsFormat, RerankFormat, ScoreFormat
from inferry.ingress.pooling.request_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    PooledFields,
    RerankRequest,
    ScoreRequest,
)
from inferry.ingress.wire_format import OPENAI, Endpoint, WireFormat

MAX_INPUTS = 2048
"""Inputs, pairs or documents of one call, as OpenAI limits them."""

_OWN_FIELDS = frozenset(
    {"model", "input", "encoding_format", "user", "service_tier", "text_1", "text_2", "query", "documents"}
    | {"top_n", "return_documents"}
)
"""Fields that are no options of the computation."""
_embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
_score_decoder = msgspec.json.Decoder(ScoreRequest)
_classify_decoder = msgspec.json.Decoder(ClassifyRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])

Inputs = list[str] | list[list[int]]


class PooledRequest(NamedTuple):
    """A decoded request. `inputs` are its inputs, or the first texts of scores; `others` the second ones.

    `params` are the names of both in the client's body. `body` is sent to HTTP workers. `options` is equal for requests
    that may share one upstream request. `features` are fields that not every worker supports.
    """

    task: Task
    wire: PooledFields
    inputs: Inputs
    others: list[str]
    params: tuple[str, str]
    body: bytes
    options: str
    format: WireFormat
    features: tuple[str, ...]


class PooledEndpoint(Endpoint):
    """An endpoint whose requests are no chat or completions requests."""

    format = OPENAI

    def decode_pooled(self, body: bytes) -> PooledRequest:
        """Validate the body. Raises InvalidRequest."""
        raise NotImplementedError


class EmbeddingsEndpoint(PooledEndpoint):
    def decode_pooled(self, body: bytes) -> PooledRequest:
        wire: EmbeddingRequest = decode_body(_embedding_decoder, body)
        inputs = _read_inputs(wire.input)
        _check_count(len(inputs), "input")
        if wire.dimensions is not None and not 1 <= wire.dimensions <= MAX_TOKEN_ID:
            raise InvalidRequest(f"`dimensions` must be between 1 and {MAX_TOKEN_ID}", param="dimensions")
        lists = {"input": inputs}
        wire_format = EmbeddingsFormat(is_base64=wire.encoding_format == "base64")
        features = () if wire.dimensions is None else ("dimensions",)
        return _request(Task.EMBED, wire, body, lists, ("input", ""), wire_format, features)


class ClassifyEndpoint(PooledEndpoint):
    def decode_pooled(self, body: bytes) -> PooledRequest:
        wire: ClassifyRequest = decode_body(_classify_decoder, body)
        inputs = _read_inputs(wire.input)
        _check_count(len(inputs), "input")
        features = ("use_activation",) if wire.use_activation is False else ()
        return _request(Task.CLASSIFY, wire, body, {"input": inputs}, ("input", ""), ClassifyFormat(), features)


class ScoreEndpoint(PooledEndpoint):
    def decode_pooled(self, body: bytes) -> PooledRequest:
        wire: ScoreRequest = decode_body(_score_decoder, body)
        first = [wire.text_1] if isinstance(wire.text_1, str) else wire.text_1
        second = [wire.text_2] if isinstance(wire.text_2, str) else wire.text_2
        _check_count(len(first), "text_1")
        _check_count(len(second), "text_2")
        if len(first) not in (1, len(second)):
            raise InvalidRequest("`text_1` must be one text, or as many as `text_2`", param="text_1")
        lists = {"text_1": first, "text_2": second}
        return _request(Task.SCORE, wire, body, lists, ("text_1", "text_2"), ScoreFormat())


class RerankEndpoint(PooledEndpoint):
    def decode_pooled(self, body: bytes) -> PooledRequest:
        wire: RerankRequest = decode_body(_rerank_decoder, body)
        documents = [one if isinstance(one, str) else one.text for one in wire.documents]
        _check_count(len(documents), "documents")
        if wire.top_n is not None and wire.top_n < 0:
            raise InvalidRequest("`top_n` must be at least 0", param="top_n")
        returned = None if wire.return_documents is False else documents
        lists = {"text_1": [wire.query], "text_2": documents}
        return _request(
            Task.SCORE, wire, body, lists, ("query", "documents"), RerankFormat(returned, wire.top_n or len(documents))
        )


ENDPOINTS: dict[bytes, Endpoint] = {
    b"/v1/embeddings": EmbeddingsEndpoint(),
    b"/v1/classify": ClassifyEndpoint(),
    b"/v1/rerank": RerankEndpoint(),
    b"/v1/score": ScoreEndpoint(),
}


def _request(
    task: Task,
    wire: PooledFields,
    body: bytes,
    lists: dict[str, Any],
    params: tuple[str, str],
    wire_format: WireFormat,
    features: tuple[str, ...] = (),
) -> PooledRequest:
    limit = wire.truncate_prompt_tokens
    if limit is not None and not (limit == -1 or 1 <= limit <= MAX_TOKEN_ID):
        name = "truncate_prompt_tokens"
        raise InvalidRequest(f"`{name}` must be -1, or between 1 and {MAX_TOKEN_ID}", param=name)
    fields = {name: raw for name, raw in _fields_decoder.decode(body).items() if name not in _OWN_FIELDS}
    fields = {name: raw for name, raw in sorted(fields.items()) if bytes(raw) != b"null"}
    inputs, *others = lists.values()
    kind = "text" if isinstance(inputs[0], str) else "ids"
    options = blake2b(msgspec.json.encode((task.value, kind, fields)), digest_size=12).hexdigest()
    own: dict[str, Any] = {"model": wire.model, **lists} | ({} if wire.user is None else {"user": wire.user})
    canonical = msgspec.json.encode({**own, **fields})
    second = others[0] if others else []
    return PooledRequest(task, wire, inputs, second, params, canonical, options, wire_format, features)


def _read_inputs(raw: Raw) -> Inputs:
    try:
        found: Any = msgspec.json.decode(raw, type=str | list[str | int | list[int]])
    except msgspec.ValidationError:
        raise _wrong_input() from None
    if isinstance(found, str):
        return [found]
    if found and all(type(one) is int for one in found):
        found = [found]
    if all(isinstance(one, str) for one in found) or all(isinstance(one, list) for one in found):
        return found  # type: ignore[no-any-return]
    raise _wrong_input()


def _wrong_input() -> InvalidRequest:
    return InvalidRequest("`input` must be text, a list of texts, token ids, or lists of token ids", param="input")


def _check_count(count: int, param: str) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"`{param}` must have between 1 and {MAX_INPUTS} entries, got {count}", param=param)
