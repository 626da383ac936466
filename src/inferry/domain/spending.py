"""What was spent before: what the ledger tells whoever keeps budgets."""

from typing import Literal

from msgspec import Struct

Period = Literal["run", "day", "month"]


class Spent(Struct, frozen=True, kw_only=True):
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
