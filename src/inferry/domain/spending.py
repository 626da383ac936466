"""Spending as recorded by the ledger, and watermarks of budgets."""

from typing import Literal, NamedTuple

from msgspec import Struct

Period = Literal["run", "day", "month"]


class Spending(Struct, frozen=True, kw_only=True):
    """Tokens, and money in billionths, spent by a tenant, a key or a run in a period.

    `at`: Unix seconds within the day or month; for a run, of its last end. `run_id` and `parent_run` are set for runs
    only. The spending of a run includes its sub-runs.
    """

    tenant: str
    period: Period
    tokens: int
    nanos: int
    at: float
    key_id: str | None = None
    run_id: str | None = None
    parent_run: str | None = None


class Watermark(Struct, frozen=True, kw_only=True):
    """Upper bound of an account's spending, written before it is spent, so that it survives a crash.

    `scope`: tenant, key or run; overflow or overflow_run for the ceilings of overflow. `name`: id of the key or run.
    `period`: day, month or run; `number`: which day or month. `at`: time of writing, Unix seconds.
    """

    scope: str
    tenant: str
    name: str
    period: str
    number: int
    tokens: int
    nanos: int
    at: float


class WatermarkBatch(NamedTuple):
    """Watermarks to write and to delete in one transaction."""

    number: int
    upserts: list[Watermark]
    deletes: list[Watermark]
