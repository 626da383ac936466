"""Which gateway runs which background responses, where several gateways share the database.

Each gateway writes one document with all that it runs, again and again while it runs any. No tenant has it.
"""

from collections.abc import Collection

import msgspec

from inferry.durable.documents import Documents

KIND = "background_claims"
NO_TENANT = ""
CLAIM_TTL_S = 10.0
"""Time after which a claim that is not renewed ends. It is more than the clocks of gateways differ."""

Place = tuple[str, str]
"""Tenant and id of a response."""

_decoder = msgspec.json.Decoder(list[Place])


class BackgroundClaims:
    """The claims of all gateways. `gateway` names this start of this one."""

    def __init__(self, documents: Documents, gateway: str) -> None:
        self._documents = documents
        self._gateway = gateway

    async def write(self, places: Collection[Place]) -> None:
        """Claim these responses, and no others, until CLAIM_TTL_S from now."""
        content = msgspec.json.encode(list(places))
        await self._documents.put(NO_TENANT, KIND, self._gateway, content, ttl_s=CLAIM_TTL_S)

    async def read(self) -> set[Place]:
        """The responses that any gateway runs."""
        return {place for one in await self._documents.of_kind(KIND) for place in _decoder.decode(one.content)}

    async def clear(self) -> None:
        """Claim nothing: other gateways need not wait for the claim to end."""
        await self._documents.delete(NO_TENANT, KIND, self._gateway)
