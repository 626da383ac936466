"""What was spent before: what the ledger tells whoever keeps budgets."""

from typing import Literal, NamedTuple

from msgspec import Struct

Period = Literal["run", "day", "month"]


class Spending(Struct, frozen=True, kw_only=True):
    """Tokens of prompts and answers, and money in billionths, that a tenant, one of its keys or one of its runs spent.

    `at` is a moment of the day or month that is meant, in seconds since the Unix epoch; for a run, of its last end.
    `run_id` and `parent_run` are given for runs alone, and a run's spending is that of all runs below it, too.
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
    """What an account may have used at most, written before it is used: a killed process leaves it behind.

    `scope` is tenant, key or run, and `name` the key's or the run's; `period` is day, month or run, and `number` which
    day or month. `at` is when it was written, in seconds since the Unix epoch.
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
    """Marks to write and marks to delete, in one transaction."""

    number: int
    upserts: list[Watermark]
    deletes: list[Watermark]
