"""Request bodies of the pooled APIs, as far as the gateway reads them. Other fields are forwarded to HTTP workers."""

from typing import Literal

from msgspec import Raw, Struct

from inferry.ingress.openai.request_schema import ReservedFields


class PooledFields(ReservedFields, kw_only=True):
    """Fields of every pooled API. `truncate_prompt_tokens`: longest input in tokens, -1 for the model's context; the
    first tokens are kept.
    """

    model: str
    user: str | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingRequest(PooledFields, kw_only=True):
    """`input`: text, a list of texts, token ids, or lists of token ids."""

    input: Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class ScoreRequest(PooledFields, kw_only=True):
    """One text with one or several others, or two lists of equal length."""

    text_1: str | list[str]
    text_2: str | list[str]


class ClassifyRequest(PooledFields, kw_only=True):
    """`input` as that of embeddings. `use_activation`: false returns logits instead of probabilities."""

    input: Raw
    use_activation: bool | None = None


class RerankDocument(Struct):
    text: str


class RerankRequest(PooledFields, kw_only=True):
    """`top_n`: number of results, best first; null and 0 return all."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None
