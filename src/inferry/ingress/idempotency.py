"""Which calls are the same call made again, as clients say it in their headers."""

from collections.abc import Mapping

from inferry.domain.errors import InvalidRequest
from inferry.domain.jobs import RepeatPolicy
from inferry.ingress.headers import identifier, int_header

IDEMPOTENCY_KEY = b"idempotency-key"
_REPLAY = b"x-inferry-replay"
_LINGER = b"x-inferry-linger-ms"
_VALUES = {b"allow": (True, False), b"never": (False, True)}


def parse_idempotency(headers: Mapping[bytes, bytes], run_id: str | None, step_id: str | None) -> RepeatPolicy | None:
    """How the call would be known if it came again; None where nothing that the client said is about that.

    An idempotency key is made for this and counts before the step. Without one it takes both run and step, as the
    client named them: steps of two runs may well have the same name.
    """
    replay = headers.get(_REPLAY)
    if replay is not None and replay.strip().lower() not in _VALUES:
        raise InvalidRequest("`x-inferry-replay` must be allow or never", param="x-inferry-replay")
    linger_ms = int_header(headers, _LINGER)
    name = identifier(headers, IDEMPOTENCY_KEY)
    if name is None:
        name = None if run_id is None else step_id
    keep, fresh = (False, False) if replay is None else _VALUES[replay.strip().lower()]
    if name is None:
        return RepeatPolicy(None, fresh=True) if fresh else None
    # No identifier has a space in it, so that no two pairs of names make one.
    return RepeatPolicy(f"{run_id or ''} {name}", keep, fresh, None if linger_ms is None else linger_ms / 1000)
