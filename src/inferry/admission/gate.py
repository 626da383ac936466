"""The gate: may a job come in, how much may it write, and what did it cost in the end.

One gate serves one gateway and has one owner, who calls `admit` once for every job, `renew` while it writes, and
`settle` once at its end, however it ends. All of a job's quotas and accounts are looked at before anything is taken
from any, so a refusal leaves no trace. Nothing here looks at a clock: `now` is the gateway's, `wall` is Unix time.

Callers without any limit share one permit per model, and nothing is counted for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from inferry.admission.books import Books, RunAccounts, Shelf
from inferry.admission.budgets import (
    NEVER,
    UNBOUNDED,
    Account,
    Calendar,
    Tariff,
    line,
    piece,
    room,
)
from inferry.admission.marks import Marks
from inferry.admission.past import Past
from inferry.admission.permits import Permit
from inferry.admission.refusals import Refusal
from inferry.admission.standing import standing
from inferry.admission.values import Line, Standing
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, LedgerUnavailable
from inferry.domain.jobs import InferenceJob
from inferry.domain.spending import Mark, Spent
from inferry.domain.streams import Usage
from inferry.domain.tenants import Limits, Price

LEASE_TOKENS = 256
MOST_NAMES = 10_000
MOST_RUNS = 100_000
RUN_IDLE_S = 86_400.0
"""A run that nobody has called for so long is taken to be over: its account is forgotten."""

_counted = attrgetter(
    "requests_per_minute", "tokens_per_minute", "max_concurrent", "run_token_ceiling", "run_money_ceiling",
    "day_token_ceiling", "month_token_ceiling", "day_money_ceiling", "month_money_ceiling",
)  # fmt: skip
_NOTHING_COUNTED = _counted(Limits())


class Gate:
    """Quotas and budgets of everybody. `refused` counts refusals by the name of the limit, `would_refuse` those of
    tenants whose limits are only reported. `overrun_tokens` and `overrun_nanos` are what engines used beyond every
    lease where no room was left to charge it."""

    def __init__(
        self,
        prices: Mapping[str, Price],
        *,
        lease_tokens: int = LEASE_TOKENS,
        most_names: int = MOST_NAMES,
        most_runs: int = MOST_RUNS,
        run_idle_s: float = RUN_IDLE_S,
        marks: Marks | None = None,
    ) -> None:
        self.marks = marks
        self._is_marked = marks is not None
        self.lease_tokens = lease_tokens
        self.refused: dict[str, int] = {}
        self.would_refuse: dict[str, int] = {}
        self.overrun_tokens = 0
        self.overrun_nanos = 0
        self._calendar = Calendar()
        self._tenants = Shelf(most_names)
        self._keys = Shelf(most_names)
        self._runs = RunAccounts(most_runs, run_idle_s, is_marked=self._is_marked)
        self._past = Past(self._tenants, self._keys, self._runs, self._calendar, run_idle_s, is_marked=self._is_marked)
        self._tariffs = {model: Tariff(price) for model, price in prices.items()}
        self._unpriced = Tariff(prices.get("*"))
        self._open = {model: Permit(tariff) for model, tariff in self._tariffs.items()}
        self._open_unpriced = Permit(self._unpriced)

    # -- a job's way -------------------------------------------------------------------------------------------------

    def admit(self, job: InferenceJob, caller: Caller, lineage: Sequence[str], now: float, wall: float) -> Permit:
        """Let the job in. `lineage` is its run, that run's parent, and so on up to the root.

        Raises RateLimited, TenantConcurrency, RunBudgetExhausted or TenantBudgetExhausted.
        """
        tenant, key = caller.tenant, caller.key
        if not has_limits(tenant.limits) and (key is None or not has_limits(key.limits)):
            return self._open.get(job.route.model, self._open_unpriced)
        if not self._calendar.begins <= wall < self._calendar.ends:
            self._calendar.turn(wall)
        permit = Permit(self._tariffs.get(job.route.model, self._unpriced))
        books = self._tenants.get(tenant.name)
        if books is None:
            books = Books(tenant.name, "tenant", is_marked=self._is_marked)
            self._tenants.add(tenant.name, books, self._calendar, now)
        if books.limits is not tenant.limits:
            books.use(tenant.limits, now)
        permit.tenant = books
        if key is not None:
            books = self._keys.get(key.key_id)
            if books is None:
                books = Books(tenant.name, "key", key.key_id, is_marked=self._is_marked)
                self._keys.add(key.key_id, books, self._calendar, now)
            if books.limits is not key.limits:
                books.use(key.limits, now)
            permit.key = books
        self._find_accounts(permit, tenant.name, lineage or (job.run_id,))
        refusal = self._look(permit, job, now)
        if tenant.shadow:
            self._let_in_anyway(permit, refusal, now)
        elif refusal is not None:
            self.refused[refusal.limit] = self.refused.get(refusal.limit, 0) + 1
            raise refusal.error()
        else:
            if len(permit.runs) == 1 and job.run_id == job.job_id:
                # A call that names no run is one of its own: after a crash it is not called again.
                permit.runs[0].token_alarm = permit.runs[0].nano_alarm = NEVER
            for account in permit.held:
                account.taken_tokens += permit.leased_tokens
                account.taken_nanos += permit.leased_nanos
                if account.taken_tokens > account.token_alarm or account.taken_nanos > account.nano_alarm:
                    self._reach(permit, account)
            self._enter(permit, now, takes=True)
        if permit.runs and job.run_id == job.job_id:
            permit.runs[0].is_over = True  # a call that names no run is one of its own, and no other will name it
        return permit

    def renew(self, permit: Permit, written: int) -> int:
        """A job has written so much: lease it a further piece, and say how much it may write in all from now on.

        What it gets is a small part of what is left, so that calls side by side share the rest.
        """
        held, may_write = permit.held, permit.may_write
        if not held or permit.is_settled:
            return may_write
        # An engine may go beyond what a client asked for by a little; beyond what is left of a budget nobody goes.
        most = permit.most if permit.is_capped or written < permit.most else written
        wanted = most - may_write
        if wanted <= 0:
            return may_write
        beyond = min(written - may_write, wanted)
        _hold_the_run_to_its_ceilings(permit)
        left, account, in_money = room(held, permit.tariff)
        if left < wanted:
            permit.bound_by, permit.bound_in_money = account, in_money
            permit.is_unmarked = False
            if left <= 0:
                return may_write
        if beyond > 0:
            granted = beyond if beyond < left else left
            granted += piece(left - granted, min(self.lease_tokens, wanted - granted))
        else:
            granted = piece(left, self.lease_tokens if self.lease_tokens < wanted else wanted)
        nanos = permit.tariff.output(granted)
        is_marked = True
        for account in held:
            account.taken_tokens += granted
            account.taken_nanos += nanos
            if account.taken_tokens > account.token_alarm or account.taken_nanos > account.nano_alarm:
                is_marked = False
        if not is_marked:
            assert self.marks is not None, "without marks there are no alarms"
            granted, nanos = self.marks.cut(permit, granted, nanos)
        permit.leased_tokens += granted
        permit.leased_nanos += nanos
        permit.may_write = may_write = may_write + granted
        return may_write

    def settle(self, permit: Permit, usage: Usage | None, now: float, wall: float) -> int | None:
        """The job is over, and used so much in all: charge that and give the rest back. None: it never ran.

        Returns what it cost, in billionths; None where the model has no price. It is charged to the day and month in
        which it was leased, whatever `wall` says now. A second time changes nothing.
        """
        tariff = permit.tariff
        if usage is None:
            cost = None if tariff.price is None else 0
            tokens = 0
        else:
            cost = tariff.cost(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.gpu_seconds)
            tokens = usage.prompt_tokens + usage.output_tokens
        tenant, key = permit.tenant, permit.key
        if tenant is None:
            return cost  # it is everybody's, and nothing is counted
        if permit.is_settled:
            return permit.cost_nanos
        permit.is_settled = True
        permit.cost_nanos = cost
        nanos = cost or 0
        if tokens <= permit.leased_tokens and nanos <= permit.leased_nanos:
            rest_tokens, rest_nanos = permit.leased_tokens - tokens, permit.leased_nanos - nanos
            for account in permit.held:
                account.spent_tokens += tokens
                account.spent_nanos += nanos
                account.taken_tokens -= rest_tokens
                account.taken_nanos -= rest_nanos
        elif permit.held:
            self._charge_beyond_leases(permit, tokens, nanos)
        for account in permit.charged:
            account.note(tokens, nanos)
        if permit.runs:
            if permit.runs[-1].parent is not None:
                _charge_above(permit.runs, tokens, nanos)
            for account in permit.runs:
                self._runs.leave(account)
        for bucket in permit.tokens:
            bucket.settle(permit.reserved - tokens, now)
        if usage is None:
            for bucket in permit.requests:
                bucket.settle(1, now)
        tenant.quotas.leave(now)
        if key is not None:
            key.quotas.leave(now)
        return cost

    def exhausted(self, permit: Permit) -> GatewayError:
        """Why the job gets no more."""
        if permit.is_unmarked:
            return LedgerUnavailable("what the call may use of its budgets could not be written to the ledger")
        account, in_money = permit.bound_by, permit.bound_in_money
        if account is None:
            _, account, in_money = room(permit.held, permit.tariff)
        assert account is not None, "who holds no leases is never stopped"
        return Refusal(account=account, in_money=in_money).error()

    # -- what people ask ---------------------------------------------------------------------------------------------

    def standing(self, caller: Caller, now: float) -> Standing | None:
        """What is left of the requests and tokens per minute; None where neither is limited. Changes nothing."""
        kept = [(caller.tenant.limits, self._tenants.get(caller.tenant.name))]
        if caller.key is not None:
            kept.append((caller.key.limits, self._keys.get(caller.key.key_id)))
        return standing(kept, now)

    def report(self, tenant: str) -> list[Line]:
        """The tenant's accounts of day and month, then those of its keys."""
        books = self._tenants.get(tenant)
        found = [(None, books)] if books is not None else []
        return [
            line(account, key_id=key_id)
            for key_id, one in [*found, *self._keys.of_tenant(tenant)]
            for account, period in ((one.day, self._calendar.day), (one.month, self._calendar.month))
            if account is not None and account.period == period
        ]

    def run_report(self, tenant: str, run_id: str) -> Line | None:
        """What a run and all below it spent and hold; None where it has no ceiling, or nobody has heard of it."""
        account = self._runs.find(tenant, run_id)
        return None if account is None else line(account, run_id=run_id)

    def unpriced(self, models: Iterable[str], limits: Iterable[Limits]) -> list[str]:
        """The models that have no price per token while somebody's money has a ceiling: they cost it nothing."""
        if all(
            one.run_money_ceiling is None and one.day_money_ceiling is None and one.month_money_ceiling is None
            for one in limits
        ):
            return []
        return [model for model in models if not self._tariffs.get(model, self._unpriced).is_per_token]

    @property
    def names(self) -> int:
        """Of how many tenants and keys books are kept."""
        return len(self._tenants) + len(self._keys)

    @property
    def accounts(self) -> int:
        """How many runs have accounts."""
        return len(self._runs)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def run_ended(self, tenant: str, run_id: str) -> None:
        """Forget the account of a run that is over, once the last of its jobs is."""
        self._runs.end(tenant, run_id)

    def forget_idle(self, now: float, at_most: int = 1000) -> int:
        """Forget accounts of runs that nobody has used for long; returns how many."""
        return self._runs.forget_idle(now, at_most)

    def restore(self, spent: Iterable[Spent], now: float = 0.0) -> None:
        """What the ledger says was spent. What is counted already is not counted again, so it may come at any time."""
        for one in spent:
            self._past.count(one, now)

    def restore_marks(self, marks: Iterable[Mark], now: float, wall: float) -> int:
        """What a process that was killed may have used at most counts as spent. Returns how many accounts that was.

        Comes after `restore`, which says what the ledger has.
        """
        counted = 0
        if self.marks is None:
            return 0
        for mark in marks:
            account = self._past.account_of(mark, now, wall)
            if account is None:
                self.marks.stale(mark)
            else:
                counted += 1
                self.marks.restored(account, mark, now)
        return counted

    def rewrite_marks(self) -> None:
        """The database is another one: it is to have the marks of all accounts."""
        if self.marks is not None:
            self.marks.rewrite(self._past.all_accounts())

    def _reach(self, permit: Permit, account: Account) -> None:
        """The account's mark is to be raised, and the job waits for it where it does not cover what was taken."""
        assert self.marks is not None, "without marks there are no alarms"
        batch = self.marks.reach(account)
        if batch > permit.batch:
            permit.batch = batch

    def _charge_beyond_leases(self, permit: Permit, tokens: int, nanos: int) -> None:
        """The job used more than it had leased: charge as far as there is room, and count the rest."""
        _hold_the_run_to_its_ceilings(permit)
        lost = [account.charge(tokens, nanos, permit.leased_tokens, permit.leased_nanos) for account in permit.held]
        self.overrun_tokens += max(tokens for tokens, _ in lost)
        self.overrun_nanos += max(nanos for _, nanos in lost)
        for account in permit.held:
            if account.taken_tokens > account.token_alarm or account.taken_nanos > account.nano_alarm:
                self._reach(permit, account)

    # -- parts of admitting ------------------------------------------------------------------------------------------

    def _find_accounts(self, permit: Permit, tenant: str, lineage: Sequence[str]) -> None:
        """The accounts the job is held to, and those it only charges."""
        books, key, held = permit.tenant, permit.key, permit.held
        assert books is not None
        calendar = self._calendar
        if books.bounds_runs or (key is not None and key.bounds_runs):
            peek = self._runs.peek
            if len(lineage) > 1:
                permit.runs = [peek(tenant, run_id) for run_id in lineage]
                permit.charged = permit.runs[:-1]
            else:
                permit.runs = [peek(tenant, lineage[0])]
            permit.root = permit.runs[-1]
            held.append(permit.root)
            _hold_the_run_to_its_ceilings(permit)
        if (account := books.today(calendar)) is not None:
            held.append(account)
        if (account := books.this_month(calendar)) is not None:
            held.append(account)
        if key is not None:
            if (account := key.today(calendar)) is not None:
                held.append(account)
            if (account := key.this_month(calendar)) is not None:
                held.append(account)

    def _look(self, permit: Permit, job: InferenceJob, now: float) -> Refusal | None:
        """Why the job may not come in, or what it is to lease and reserve. Takes nothing."""
        payload, prompt = job.payload, job.footprint.prompt
        choices, cap = payload.choices, job.token_budget
        limit = payload.output_limit
        is_named = limit is None or limit <= cap * choices
        if permit.held:
            tariff = permit.tariff
            prompt_nanos = tariff.prompt(prompt.high)
            left, account, in_money = room(permit.held, tariff, prompt.high, prompt_nanos)
            least = choices if cap else 0  # who shares another's answer writes nothing
            if left < least:
                assert account is not None
                return Refusal(account=account, in_money=in_money)
            most = cap * choices if limit is None or is_named or not cap else limit
            if left < cap * choices:
                cap = left // choices
                most = cap * choices
                permit.is_capped = True
                permit.bound_by, permit.bound_in_money = account, in_money
            granted = piece(left, self.lease_tokens if self.lease_tokens < most else most)
            if granted < least:
                granted = least
            permit.may_write = granted
            permit.most = most
            permit.leased_tokens = prompt.high + granted
            permit.leased_nanos = prompt_nanos + tariff.output(granted)
        permit.output_cap = cap
        if not is_named and not permit.is_capped:
            cap = min(cap, job.footprint.output.high)
        permit.reserved = reserved = prompt.expected + cap * choices
        tenant, key = permit.tenant, permit.key
        assert tenant is not None
        wait = tenant.quotas.wait(reserved, now)
        books = tenant
        if key is not None:
            other = key.quotas.wait(reserved, now)
            if other is not None and (wait is None or other > wait):
                wait, books = other, key
        return None if wait is None else Refusal(wait_s=wait[0], quota=wait[1], books=books)

    def _enter(self, permit: Permit, now: float, *, takes: bool) -> None:
        """Count the job in, and take from its buckets what was looked at."""
        if permit.runs:
            self._enter_runs(permit.runs, now)
        for books in (permit.tenant, permit.key):
            if books is None:
                continue
            quotas = books.quotas
            quotas.enter(now)
            if takes:
                if quotas.requests is not None:
                    quotas.requests.take(1)
                    permit.requests.append(quotas.requests)
                if quotas.tokens is not None:
                    quotas.tokens.take(permit.reserved)
                    permit.tokens.append(quotas.tokens)

    def _enter_runs(self, runs: list[Account], now: float) -> None:
        """Count the job in the accounts of its run and of all above it."""
        for account in runs:
            self._runs.use(account, now)
        for level in range(len(runs) - 1, 0, -1):
            below, account = runs[level - 1], runs[level]
            if below.parent is not account:
                # It got a parent only now: what it spent by itself is part of what all above have spent from here on.
                below.parent = account
                for one in runs[level:]:
                    self.overrun_tokens += one.charge(below.spent_tokens, below.spent_nanos, 0, 0)[0]

    def _let_in_anyway(self, permit: Permit, refusal: Refusal | None, now: float) -> None:
        """A tenant whose limits are only reported. Who would have been refused takes nothing from those who come."""
        if refusal is not None:
            self.would_refuse[refusal.limit] = self.would_refuse.get(refusal.limit, 0) + 1
        permit.charged = permit.charged + permit.held
        permit.held = []
        permit.root = None
        permit.may_write = permit.most = permit.output_cap = UNBOUNDED
        permit.leased_tokens = permit.leased_nanos = 0
        permit.is_capped = False
        self._enter(permit, now, takes=refusal is None)


def has_limits(limits: Limits) -> bool:
    """Whether there is anything to count for whoever has them."""
    return _counted(limits) != _NOTHING_COUNTED


def _hold_the_run_to_its_ceilings(permit: Permit) -> None:
    """Several keys may have calls in one run: each is held to its own, as they are now."""
    root, tenant, key = permit.root, permit.tenant, permit.key
    if root is None or tenant is None:
        return
    tokens, nanos = tenant.run_tokens, tenant.run_nanos
    if key is not None:
        if key.run_tokens < tokens:
            tokens = key.run_tokens
        if key.run_nanos < nanos:
            nanos = key.run_nanos
    root.hold_to(tokens, nanos)


def _charge_above(runs: list[Account], tokens: int, nanos: int) -> None:
    """The run became part of another one while the job was in flight."""
    seen = list(runs)
    above = runs[-1].parent
    while above is not None and above not in seen:  # who is forgotten and comes again may make a circle
        above.charge(tokens, nanos, 0, 0)
        seen.append(above)
        above = above.parent
