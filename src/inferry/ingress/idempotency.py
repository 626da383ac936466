"""Idempotency headers: which calls are repetitions of one call."""

from collections.abc import Mapping
from typing import Final

from inferry.domain.errors import InvalidRequest
from inferry.domain.jobs import RepeatPolicy
from inferry.ingress.headers import identifier, int_header
from inferry.ingress.job_ids import MADE_RUN

IDEMPOTENCY_KEY: Final = b"idempotency-key"
_REPLAY: Final = b"x-inferry-replay"
_LINGER: Final = b"x-inferry-linger-ms"
_VALUES: Final = {b"allow": (True, False), b"never": (False, True)}


def parse_idempotency(headers: Mapping[bytes, bytes], run_id: str | None, step_id: str | None) -> RepeatPolicy | None:
    """The name under which a repetition of the call is recognised; None where the headers give none.

    The idempotency key has precedence over the step. Without a key both run and step must be named by the client:
    steps of different runs may have the same name. A run that the gateway has made for a composed call is not named.
    """
    if MADE_RUN in headers:
        run_id = None
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
    # Identifiers have no spaces, so different pairs cannot give the same name.
    return RepeatPolicy(f"{run_id or ''} {name}", keep, fresh, None if linger_ms is None else linger_ms / 1000)
