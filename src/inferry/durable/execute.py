"""The port through which stored work runs: any API's body, executed by the gateway's own endpoints."""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct


class StoredCall(Struct, frozen=True, kw_only=True):
    """A call made later for a tenant, with the key it was accepted with.

    `job_id` is the ledger's key: a call that a killed process did not finish is repeated under the same one, and the
    ledger keeps the row it has. `headers` are further request headers, in lower case. Run, step and lane are None where
    the headers give them. `on_piece` is called with the pieces of a streamed response.
    """

    tenant: str
    key_id: str | None
    path: str
    body: bytes
    job_id: str
    run_id: str | None
    step_id: str | None
    lane: str | None = "P2"
    headers: dict[bytes, bytes] = {}
    on_piece: Callable[[bytes], None] | None = None


class CallAnswer(Struct, frozen=True, kw_only=True):
    """What a client would have received. `retry_after_s` is None where a retry does not help."""

    status: int
    body: bytes
    code: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None


class Execute(Protocol):
    """Makes a call. Cancelling the task cancels the call."""

    def paths(self) -> frozenset[str]:
        """Paths of the endpoints that can be called."""

    async def call(self, call: StoredCall) -> CallAnswer: ...
