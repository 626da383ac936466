"""What a request says in its headers: its lane, who sent it, how long it may take."""

import re
from collections.abc import Mapping

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, InvalidRequest, LaneNotAllowed, UnknownLane
from inferry.domain.lanes import Lane

_TIERS = {"default": Lane.P1, "priority": Lane.P0, "flex": Lane.P2}
_IDENTIFIER = re.compile(r"[\x21-\x7e]{1,256}")


def lane_of(headers: Mapping[bytes, bytes], tier: str | None, caller: Caller) -> Lane:
    """The lane a request goes in: never above the highest of its key.

    The header is an order, so one that asks for more is refused. A service tier is a wish, and the answer says which
    one was granted.
    """
    named = headers.get(b"x-inferry-lane")
    if named is not None:
        try:
            lane = Lane[named.decode("latin-1").strip().upper()]
        except KeyError:
            raise UnknownLane("`x-inferry-lane` must be P0, P1 or P2", param="x-inferry-lane") from None
        if lane < caller.max_lane:
            raise LaneNotAllowed(
                f"the highest lane for this key is {caller.max_lane.name}; {lane.name} was asked for",
                param="x-inferry-lane",
            )
        return lane
    if tier is None or tier == "auto":
        return caller.default_lane
    requested = _TIERS.get(tier)
    if requested is None:
        raise InvalidRequest("`service_tier` must be auto, default, priority or flex", param="service_tier")
    return max(requested, caller.max_lane)


def tier_of(lane: Lane) -> str:
    """The service tier that a lane is."""
    return _TIER_OF[lane]


_TIER_OF = {lane: tier for tier, lane in _TIERS.items()}


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


def int_header(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        shown = name.decode()
        raise InvalidRequest(f"`{shown}` must be a whole number of 0 or above", param=shown)
    return int(text)
