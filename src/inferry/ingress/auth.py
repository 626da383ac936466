"""Who sent a request: asked once, before anything else is read of it."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidApiKey

_ON_THIS_MACHINE = ("127.", "::ffff:127.")


class Callers(Protocol):
    """Whoever knows the tenants and their keys."""

    @property
    def is_required(self) -> bool:
        """Whether callers have to bring a key."""
        ...

    def caller(
        self, authorization: bytes | None, x_api_key: bytes | None, tenant_header: bytes | None, wall: float
    ) -> Caller:
        """Who sent these headers. Raises InvalidApiKey."""
        ...


class Auth:
    """From headers to a caller.

    Without keys the gateway serves its own machine and nobody else, whatever address it listens on; `off_for_all` is
    the operator's word that somebody else keeps strangers away.
    """

    __slots__ = ("_callers", "_off_for_all", "_wall")

    def __init__(self, callers: Callers, *, off_for_all: bool = False, wall: Callable[[], float] = time.time) -> None:
        self._callers = callers
        self._off_for_all = off_for_all
        self._wall = wall

    def caller(self, headers: Mapping[bytes, bytes], peer: str) -> Caller:
        """Who sent the request. Raises InvalidApiKey."""
        callers = self._callers
        if not (callers.is_required or self._off_for_all or peer.startswith(_ON_THIS_MACHINE) or peer == "::1"):
            raise InvalidApiKey("without API keys this gateway serves only its own machine; create one there")
        get = headers.get
        return callers.caller(get(b"authorization"), get(b"x-api-key"), get(b"x-inferry-tenant"), self._wall())
