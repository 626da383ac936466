"""What the ledger holds of a call that `inferry observe` passed on, beside the columns of every attempt."""

import msgspec
from msgspec import Struct

from inferry.domain.ledger import LedgerEntry

UPSTREAM = "upstream"
"""The worker of observed calls."""
SLICE_BYTES = 2048


class ObservedFields(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the column `decision` holds for an observed call. `late_ms`: how late the latest token was, relative to a
    stream that keeps the lane's inter-token latency. `prefix`: chained hashes of slices of `slice_bytes`.
    """

    status: int
    late_ms: float | None = None
    longest_gap_ms: float | None = None
    is_estimated: bool = False
    prompt_bytes: int = 0
    prefix: tuple[str, ...] = ()


class Observed(Struct, frozen=True):
    observed: ObservedFields


def observed_fields(entry: LedgerEntry) -> ObservedFields | None:
    """The fields of a row that `inferry observe` wrote; None for others."""
    try:
        return None if entry.decision is None else msgspec.json.decode(entry.decision, type=Observed).observed
    except msgspec.MsgspecError:
        return None
