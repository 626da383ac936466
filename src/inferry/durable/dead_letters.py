"""Work that was given up: kept for operators, without its content, in the database."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from inferry.durable.documents import Documents

DEAD_LETTER = "dead_letter"
"""Kind of the documents, and code of the error that the work ends with."""
TTL_S = 30 * 86_400.0


class DeadLetter(Struct, frozen=True, kw_only=True):
    """Why work was given up. `id` is that of an async job, or of a batch and its item. `at` is in Unix seconds."""

    id: str
    tenant: str
    model: str
    reason: str
    deliveries: int
    at: float


_decoder = msgspec.json.Decoder(DeadLetter)


class DeadLetters:
    """Belongs to one event loop."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def put(self, letter: DeadLetter) -> None:
        await self._documents.put(letter.tenant, DEAD_LETTER, letter.id, msgspec.json.encode(letter), ttl_s=TTL_S)

    async def list(self) -> Sequence[DeadLetter]:
        """Those of all tenants, the oldest first."""
        return [_decoder.decode(one.content) for one in await self._documents.of_kind(DEAD_LETTER)]
