"""The pooled APIs in the OpenAPI document: bodies and responses."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from inferry.ingress.pooling.request_schema import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest


class PooledUsage(Struct, forbid_unknown_fields=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, forbid_unknown_fields=True):
    """`embedding`: numbers, or with `encoding_format: base64` little-endian float32 values."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Score(Struct, forbid_unknown_fields=True):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class Classification(Struct, forbid_unknown_fields=True):
    """`label`: the most probable one. `probs`: of all labels, in the model's order."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: PooledUsage


class DocumentText(Struct, forbid_unknown_fields=True):
    text: str


class RerankResult(Struct, forbid_unknown_fields=True):
    """`index`: the place of the document in the request. `document` is missing with `return_documents: false`."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Reranking(Struct, forbid_unknown_fields=True):
    """Results with the highest score first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


REQUESTS: tuple[type[Struct], ...] = (EmbeddingRequest, ClassifyRequest, ScoreRequest, RerankRequest)
RESPONSES: tuple[type[Struct], ...] = (EmbeddingList, ClassificationList, ScoreList, Reranking)
CALLS: dict[str, tuple[str, type[Struct], type[Struct]]] = {
    "/v1/embeddings": ("Embed texts or token ids", EmbeddingRequest, EmbeddingList),
    "/v1/classify": ("Classify texts or token ids", ClassifyRequest, ClassificationList),
    "/v1/score": ("Score pairs of texts", ScoreRequest, ScoreList),
    "/v1/rerank": ("Order documents by their score with a query", RerankRequest, Reranking),
}

_TEXT: dict[str, Any] = {"type": "string"}
_TOKEN_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}


def field_schemas(max_inputs: int) -> dict[str, dict[str, Any]]:
    """Schemas of fields that stay undecoded, or whose length the code checks."""

    def listed(items: dict[str, Any]) -> dict[str, Any]:
        return {"type": "array", "minItems": 1, "maxItems": max_inputs, "items": items}

    texts: dict[str, Any] = {"anyOf": [_TEXT, listed(_TEXT)]}
    document = {"$ref": "#/components/schemas/RerankDocument"}
    return {
        "input": {"anyOf": [_TEXT, listed(_TEXT), _TOKEN_IDS, listed(_TOKEN_IDS)]},
        "text_1": texts,
        "text_2": texts,
        "documents": listed({"anyOf": [_TEXT, document]}),
    }
