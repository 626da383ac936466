"""Money for calls to hosted workers that take overflow: ceilings per tenant and day, and per run.

A job reserves the most that it can cost before it is sent, and is charged its cost when its attempt has ended. Spent +
reserved never exceeds a ceiling, whatever runs at the same time. Watermarks in the database cover what is reserved
before a job is sent (module `watermarks`), so that a ceiling also counts the calls of a killed process. The run of a
sub-run is the root of its tree. Time is an argument: `now` is the gateway's clock, `wall` is Unix time.
"""

from collections.abc import Iterable, Mapping

from inferry.admission.accounts import RunAccounts
from inferry.admission.budgets import NO_THRESHOLD, UNBOUNDED, Account, Calendar, Tariff, to_nanos
from inferry.admission.watermarks import WatermarkTracker
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import Price
from inferry.domain.spending import Spending, Watermark

MAX_TENANTS = 10_000
MAX_RUNS = 100_000
RUN_IDLE_TIMEOUT_S = 86_400.0

DAY_CEILING = "day_money_ceiling"
RUN_CEILING = "run_money_ceiling"

DAY_SCOPE, RUN_SCOPE = "overflow", "overflow_run"
"""Scopes of watermarks."""


class OverflowReservation:
    """What one job has reserved of the accounts of its tenant and run. `tariff` is the hosted price of its model,
    `watermark_batch` the batch of watermarks that must be in the database before the job is sent; 0 for none."""

    __slots__ = ("accounts", "nanos", "tariff", "watermark_batch")

    def __init__(self, accounts: tuple[Account, Account], nanos: int, tariff: Tariff, watermark_batch: int) -> None:
        self.accounts = accounts
        self.nanos = nanos
        self.tariff = tariff
        self.watermark_batch = watermark_batch


class OverflowBudget:
    """The accounts of all tenants and runs. `prices` are those of the hosted workers, by model; `*` is any other.

    `spent_nanos`: the sum of all charges. `overrun_nanos`: the part that exceeded reservations, because a hosted worker
    wrote more than it was asked for; it counts against the ceilings.
    """

    def __init__(
        self,
        prices: Mapping[str, Price],
        day_ceiling: float,
        run_ceiling: float | None = None,
        tenant_day_ceilings: Mapping[str, float] | None = None,
        watermarks: WatermarkTracker | None = None,
    ) -> None:
        self._tariffs = {model: Tariff(price) for model, price in prices.items()}
        self._day_nanos = to_nanos(day_ceiling)
        self._run_nanos = to_nanos(run_ceiling)
        self._tenant_nanos = {name: to_nanos(amount) for name, amount in (tenant_day_ceilings or {}).items()}
        self._calendar = Calendar()
        self._days: dict[str, Account] = {}
        self._watermarks = watermarks
        self._uses_watermarks = watermarks is not None
        self._runs = RunAccounts(
            MAX_RUNS, RUN_IDLE_TIMEOUT_S, owner_kind=RUN_SCOPE, uses_watermarks=self._uses_watermarks
        )
        self.spent_nanos = 0
        self.overrun_nanos = 0

    def reserve(self, job: InferenceJob, run_id: str, now: float, wall: float) -> OverflowReservation | str:
        """Reserve the most that the job can cost, or return the name of the ceiling that leaves less.

        A model without a price per token is never afforded.
        """
        tariff = self._tariffs.get(job.route.model) or self._tariffs.get("*")
        if tariff is None or not tariff.is_per_token:
            return DAY_CEILING
        self._calendar.advance_to(wall)
        nanos = max_cost_nanos(job, tariff)
        day = self._day_account(job.tenant)
        if day is None or day.committed_nanos + nanos > day.nano_ceiling:
            return DAY_CEILING
        run = self._runs.get_or_new(job.tenant, run_id)
        run.set_ceilings(run.token_ceiling, self._run_nanos)
        if run.committed_nanos + nanos > run.nano_ceiling:
            return RUN_CEILING
        self._runs.acquire(run, now)
        if job.run_id == job.job_id:
            run.is_ended = True  # no other call will name this run
        if self._run_nanos == UNBOUNDED or run_id == job.job_id:
            run.token_threshold = run.nano_threshold = NO_THRESHOLD
        day.committed_nanos += nanos
        run.committed_nanos += nanos
        return OverflowReservation((day, run), nanos, tariff, max(map(self._request_watermark, (day, run))))

    def settle(self, reservation: OverflowReservation, cost_nanos: int) -> None:
        """Replace a reservation by what the job cost, in the day in which it was reserved."""
        for account in reservation.accounts:
            account.spent_nanos += cost_nanos
            account.committed_nanos += cost_nanos - reservation.nanos
        self._runs.release(reservation.accounts[1])
        self.spent_nanos += cost_nanos
        self.overrun_nanos += max(0, cost_nanos - reservation.nanos)

    def restore(self, spent: Iterable[Spending], now: float, wall: float) -> None:
        """Count what the ledger has of this day and of runs, once at the start."""
        self._calendar.advance_to(wall)
        for one in spent:
            if one.run_id is not None:
                self._runs.touch(one.tenant, one.run_id, now).record_spending(0, one.nanos)
            elif (day := self._day_account(one.tenant)) is not None:
                day.record_spending(0, one.nanos)

    def restore_watermarks(self, watermarks: Iterable[Watermark], now: float, wall: float) -> int:
        """Count the most that a killed process may have spent; return the number of accounts. Call it after `restore`.
        Without a database, or for a day or run that is over, nothing is counted."""
        self._calendar.advance_to(wall)
        counted = 0
        for watermark in watermarks:
            account: Account | None = None
            if watermark.scope == RUN_SCOPE:
                if wall - watermark.at < RUN_IDLE_TIMEOUT_S:
                    account = self._runs.touch(watermark.tenant, watermark.name, now)
            elif watermark.number == self._calendar.day:
                account = self._day_account(watermark.tenant)
            if self._watermarks is not None and account is not None:
                self._watermarks.restore_account(account, watermark, now)
                counted += 1
            elif self._watermarks is not None:
                self._watermarks.discard(watermark)
        return counted

    def accounts(self) -> list[Account]:
        """The accounts of all days and runs."""
        return [*self._days.values(), *self._runs.all()]

    def _request_watermark(self, account: Account) -> int:
        """Have the account's watermark raised where it does not cover what is committed; the batch to wait for."""
        if account.committed_tokens <= account.token_threshold and account.committed_nanos <= account.nano_threshold:
            return 0
        assert self._watermarks is not None, "thresholds exist only with watermarks"
        return self._watermarks.request_raise(account)

    def _day_account(self, tenant: str) -> Account | None:
        """The tenant's account of this day; None where there are too many tenants to count another one."""
        account = self._days.get(tenant)
        if account is None or account.period != self._calendar.day:
            if account is None and len(self._days) >= MAX_TENANTS:
                self._forget_unused()
                if len(self._days) >= MAX_TENANTS:
                    return None
            account = self._days[tenant] = Account(
                " a day", DAY_SCOPE, self._calendar.day, (tenant, ""), uses_watermarks=self._uses_watermarks
            )
            account.set_ceilings(account.token_ceiling, self._tenant_nanos.get(tenant, self._day_nanos))
        return account

    def _forget_unused(self) -> None:
        """Forget accounts of other days, and those of this day with nothing spent or reserved."""
        for tenant, account in list(self._days.items()):
            if account.period != self._calendar.day or not account.committed_nanos:
                del self._days[tenant]


def max_cost_nanos(job: InferenceJob, tariff: Tariff) -> int:
    """The most that the job can cost. A prompt has at most one token per byte of the body."""
    payload = job.payload
    prompt = max(job.footprint.prompt.high, len(payload.body))
    output = job.token_budget * payload.choices
    if payload.output_limit is not None:
        output = max(output, payload.output_limit)
    return tariff.prompt(prompt) + tariff.output(output)
