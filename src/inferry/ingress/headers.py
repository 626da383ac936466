"""What a request says in its headers: its lane, who sent it, how long it may take."""

import re
from collections.abc import Mapping

from inferry.domain.errors import GatewayError, InvalidRequest, UnknownLane
from inferry.domain.jobs import Lane

_TIERS = {"auto": Lane.P1, "default": Lane.P1, "priority": Lane.P0, "flex": Lane.P2}
_IDENTIFIER = re.compile(r"[\x21-\x7e]{1,256}")


def lane_of(headers: Mapping[bytes, bytes], tier: str | None) -> Lane:
    named = headers.get(b"x-inferry-lane")
    if named is not None:
        try:
            return Lane[named.decode("latin-1").strip().upper()]
        except KeyError:
            raise UnknownLane("`x-inferry-lane` must be P0, P1 or P2", param="x-inferry-lane") from None
    lane = _TIERS.get(tier or "auto")
    if lane is None:
        raise InvalidRequest("`service_tier` must be auto, default, priority or flex", param="service_tier")
    return lane


def identifier(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    if not value:
        return None
    text = value.decode("latin-1")
    if _IDENTIFIER.fullmatch(text) is None:
        shown = name.decode()
        raise InvalidRequest(f"`{shown}` must be 1 to 256 printable ASCII characters without spaces", param=shown)
    return text


def request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The client's own id, if it is one that can be echoed."""
    try:
        return identifier(headers, b"x-request-id")
    except GatewayError:
        return None


def whole_number(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        shown = name.decode()
        raise InvalidRequest(f"`{shown}` must be a whole number of 0 or above", param=shown)
    return int(text)
