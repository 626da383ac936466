"""Values from request headers: the lane of a call, identifiers and numbers."""

import re
from collections.abc import Mapping
from typing import Final

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, InvalidRequest, LaneNotAllowed, UnknownLane
from inferry.domain.lanes import Lane

_TIERS: Final = {"default": Lane.P1, "priority": Lane.P0, "flex": Lane.P2}
# Not `.` and `..`, which clients remove from the path of a URL.
_IDENTIFIER: Final = re.compile(r"(?!\.{1,2}\Z)[\x21-\x7e]{1,256}")


def lane_of(headers: Mapping[bytes, bytes], tier: str | None, caller: Caller) -> Lane:
    """The lane of a request, never above the key's highest.

    A header above that lane is refused. A service tier above it is lowered, and the response names the tier granted.
    """
    named = headers.get(b"x-inferry-lane")
    if named is not None:
        try:
            lane = Lane[named.decode("latin-1").strip().upper()]
        except KeyError:
            raise UnknownLane("`x-inferry-lane` must be P0, P1 or P2", param="x-inferry-lane") from None
        if lane < caller.max_lane:
            raise LaneNotAllowed(
                f"lane {lane.name} exceeds the highest lane of this key, {caller.max_lane.name}",
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
    """The service tier of a lane."""
    return _TIER_OF[lane]


_TIER_OF: Final = {lane: tier for tier, lane in _TIERS.items()}


def identifier(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    if not value:
        return None
    text = value.decode("latin-1")
    if _IDENTIFIER.fullmatch(text) is None:
        shown = name.decode()
        rule = "must be 1 to 256 printable ASCII characters without spaces, and not `.` or `..`"
        raise InvalidRequest(f"`{shown}` {rule}", param=shown)
    return text


def request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The client's request id; None where it is malformed."""
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
        raise InvalidRequest(f"`{shown}` must be a non-negative integer of at most 12 digits", param=shown)
    return int(text)
