"""Stored responses of tenants: what was answered, and the input it was the answer to."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from inferry.domain.errors import GatewayError, InvalidRequest, NotFound, StorageDisabled
from inferry.domain.storage import StorageLimits
from inferry.durable.documents import Documents

log = logging.getLogger(__name__)

KIND = "response"
EVENTS_KIND = "response_events"
EVENTS_TTL_S = 3600.0
MAX_CHAIN = 1000
"""Most responses that one response may follow on, each on another."""
MAX_CHAIN_BYTES = 32 * 1024 * 1024
UNFINISHED = ("queued", "in_progress")

_ERROR_CODES = {402: "insufficient_quota", 429: "rate_limit_exceeded"}
_encode = msgspec.json.encode


class ResponseState(Struct):
    """What of a response object is read."""

    status: str
    output: list[Raw]
    background: bool = False


class StoredResponse(Struct, kw_only=True):
    """`response` is the response object, `input` the items of its own request, `previous` the id it follows on."""

    response: Raw
    input: list[Raw]
    previous: str | None = None

    @property
    def state(self) -> ResponseState:
        return msgspec.json.decode(self.response, type=ResponseState)


_decoder = msgspec.json.Decoder(StoredResponse)


class StoredResponses:
    """The responses of all tenants. Belongs to one event loop.

    Operations run in the order in which they are asked for, so a response that `keep` was given is found afterwards.
    """

    def __init__(self, documents: Documents, limits: StorageLimits) -> None:
        self._documents = documents
        self._limits = limits
        self.quota = documents.quota
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_enabled(self) -> bool:
        return self._limits.store == "always"

    def require_enabled(self, param: str | None = None) -> None:
        """Raises StorageDisabled where nothing is stored."""
        if not self.is_enabled:
            raise StorageDisabled("this gateway stores no responses", param=param)

    def keep(self, tenant: str, id: str, stored: StoredResponse) -> None:
        """Store the response without waiting for the database."""
        task = asyncio.get_running_loop().create_task(self._keep(tenant, id, stored))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def put(self, tenant: str, id: str, stored: StoredResponse, *, is_limited: bool = False) -> None:
        """The response is in the database when this returns. Raises StorageQuotaExceeded where `is_limited`: a
        background response is limited when it is accepted, not when it has ended.
        """
        ttl_s = self._limits.response_ttl_s
        await self._documents.put(tenant, KIND, id, _encode(stored), ttl_s=ttl_s, is_limited=is_limited)

    async def get(self, tenant: str, id: str) -> StoredResponse:
        """Raises NotFound."""
        found = await self._find(tenant, id)
        if found is None:
            raise _not_found(id)
        return found

    async def end(self, tenant: str, id: str, ended: Callable[[Raw], Raw]) -> StoredResponse:
        """Store how an unfinished response ended, and return what is stored: of several ends, at any gateway, the first
        counts. Raises NotFound.
        """
        while True:
            document = await self._documents.get(tenant, KIND, id)
            if document is None:
                raise _not_found(id)
            stored = _decoder.decode(document.content)
            if stored.state.status not in UNFINISHED:
                return stored
            stored.response = ended(stored.response)
            ttl_s = self._limits.response_ttl_s
            if await self._documents.swap(tenant, KIND, id, document.content, _encode(stored), ttl_s=ttl_s):
                return stored

    async def chain(self, tenant: str, id: str) -> list[StoredResponse]:
        """The response and those it follows on, the oldest first. Raises NotFound, InvalidRequest."""
        found: list[StoredResponse] = []
        size = 0
        next_id: str | None = id
        while next_id is not None:
            one = await self._find(tenant, next_id)
            if one is None:
                raise NotFound(
                    f"Previous response with id '{_shown(next_id)}' not found.", param="previous_response_id"
                )
            size += len(one.response) + sum(map(len, one.input))
            if len(found) == MAX_CHAIN or size > MAX_CHAIN_BYTES:
                raise InvalidRequest(
                    f"`previous_response_id`: the conversation has more than {MAX_CHAIN} responses or "
                    f"{MAX_CHAIN_BYTES} bytes",
                    param="previous_response_id",
                )
            found.append(one)
            next_id = one.previous
        return found[::-1]

    async def delete(self, tenant: str, id: str) -> bool:
        """Whether there was such a response."""
        await self._documents.delete(tenant, EVENTS_KIND, id)
        return await self._documents.delete(tenant, KIND, id)

    async def put_events(self, tenant: str, id: str, events: Sequence[bytes]) -> None:
        """Store the events of a response that was streamed, for an hour at most."""
        ttl_s = self._limits.response_ttl_s
        ttl_s = EVENTS_TTL_S if ttl_s is None else min(ttl_s, EVENTS_TTL_S)
        await self._documents.put(tenant, EVENTS_KIND, id, b"".join(events), ttl_s=ttl_s)

    async def events(self, tenant: str, id: str) -> bytes | None:
        found = await self._documents.get(tenant, EVENTS_KIND, id)
        return None if found is None else found.content

    async def close(self) -> None:
        """Wait for what is being stored."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _find(self, tenant: str, id: str) -> StoredResponse | None:
        found = await self._documents.get(tenant, KIND, id)
        return None if found is None else _decoder.decode(found.content)

    async def _keep(self, tenant: str, id: str, stored: StoredResponse) -> None:
        try:
            await self.put(tenant, id, stored, is_limited=True)
        except GatewayError as error:
            log.error("cannot store a response: %s", error.code)
        except Exception as error:
            log.error("cannot store a response: %s", type(error).__name__)


def failure(status: int, code: str | None, message: str, retry_after_s: float | None = None) -> dict[str, Any]:
    """The `error` of a failed response. Codex retries `server_error`, and `rate_limit_exceeded` as the text says."""
    found = _ERROR_CODES.get(status, "invalid_prompt" if status < 500 else "server_error")
    if found == "rate_limit_exceeded":
        message += f" Please try again in {max(0.1, retry_after_s or 1.0):.1f}s."
    return {"code": found, "message": message, "type": code}


def _not_found(id: str) -> NotFound:
    return NotFound(f"Response with id '{_shown(id)}' not found.", param="id")


def _shown(id: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in id[:100])
