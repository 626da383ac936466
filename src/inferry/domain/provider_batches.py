"""Batches of hosted providers: one of them executes many items of a gateway's batch, at a lower price, within a day."""

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from msgspec import Struct

ProviderApi = Literal["openai", "anthropic"]


class ProviderBatch(Struct, frozen=True, kw_only=True):
    """A provider's batch with items of the batch `batch_id`. `id` is the gateway's own name of it, the marker.

    `is_begun`: a submission was begun, so that the provider may have the batch although `provider_id` is unknown.
    """

    id: str
    batch_id: str
    worker: str
    created_at: float
    items: int
    is_begun: bool = False
    provider_id: str | None = None


class AssignedItem(Struct, frozen=True):
    """An item that a provider's batch executes. `body` is empty where only the result is of interest."""

    number: int
    custom_id: str
    tries: int
    body: bytes = b""


class ProviderRequest(Struct, frozen=True):
    """One request of a provider's batch. `body` is that of the path's endpoint."""

    custom_id: str
    body: bytes


class ProviderResult(Struct, frozen=True, kw_only=True):
    """The result of one request. `status` and `body` are what the endpoint would have answered.

    `outcome` is None where the request was executed. Tokens are what the provider reports.
    """

    custom_id: str
    outcome: Literal["canceled", "expired"] | None = None
    status: int = 200
    body: bytes = b""
    request_id: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class ProviderState(Struct, frozen=True, kw_only=True):
    """`has_ended`: its results are complete. `has_expired`: requests without a result were too late. `error`: why the
    provider refused the batch as a whole; None where it did not.
    """

    has_ended: bool
    has_expired: bool = False
    error: str | None = None


class ProviderRefused(Exception):
    """The provider refuses a request for good. The text quotes nothing of the request."""


class BatchProvider(Protocol):
    """The batch API behind one hosted worker. Methods raise WorkerLost where the provider cannot be reached or asks to
    try again, and ProviderRefused where a repetition would not help.

    `models` and `paths`: the requests that it takes. `pool`: the tenant that the worker is reserved for.
    `price_factor`: its price, as a multiple of the model's.
    """

    worker: str
    models: tuple[str, ...]
    paths: frozenset[str]
    pool: str | None
    price_factor: float

    async def submit(self, marker: str, path: str, requests: Sequence[ProviderRequest]) -> str:
        """Create a batch; return the provider's id of it."""
        ...

    async def find(self, marker: str, since: float, count: int) -> str | None:
        """The id of a batch with this marker and `count` requests that was created after `since`; None: there is none.
        Raises WorkerLost where that is not known yet.
        """
        ...

    async def state(self, provider_id: str) -> ProviderState: ...

    def results(self, provider_id: str) -> AsyncIterator[ProviderResult]: ...

    async def cancel(self, provider_id: str) -> None:
        """Request the end of a batch. One that has ended stays as it is."""
        ...

    def close(self) -> None: ...
