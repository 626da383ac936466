"""Whatever comes in whatever order, no ceiling is exceeded, no bucket overdrawn, and every lease comes back."""

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from msgspec import Struct

from admission.builders import NOON, a_call
from inferry.admission.budgets import UNBOUNDED, Account
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, RateLimited, RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import Price
from inferry.domain.streams import Usage
from inferry.domain.tenants import ApiKey, Limits, Tenant

PRICES = {"m": Price(input=1.0, cached_input=0.25, output=3.7), "n": Price(input=0.0013, output=0.0007)}
LINEAGES = (("r",), ("s", "r"), ("t", "s", "r"), ("u", "r"), ("v",))
TENANTS = ("a", "b")
KEYS = (None, "k1", "k2")

ceilings = st.none() | st.integers(0, 3_000)
amounts = st.none() | st.sampled_from([0.0, 0.0001, 0.001, 0.01, 10.0])
limits = st.builds(
    Limits,
    requests_per_minute=st.none() | st.integers(0, 30),
    tokens_per_minute=st.none() | st.integers(0, 3_000),
    max_concurrent=st.none() | st.integers(0, 6),
    run_token_ceiling=ceilings,
    run_money_ceiling=amounts,
    day_token_ceiling=ceilings,
    month_token_ceiling=ceilings,
    day_money_ceiling=amounts,
    month_money_ceiling=amounts,
)
calls = st.builds(
    a_call,
    st.integers(1, 300),
    st.integers(1, 900),
    model=st.sampled_from(["m", "n", "unpriced"]),
    choices=st.sampled_from([1, 1, 1, 3]),
    named=st.booleans(),
    predicted=st.integers(1, 300),
)


class Flight:
    """A job in flight, and how much of it has been written."""

    def __init__(self, permit: Permit, job: InferenceJob, tenant: str) -> None:
        self.permit = permit
        self.job = job
        self.tenant = tenant
        self.written = 0


class Sum(Struct):
    tokens: int = 0
    nanos: int = 0


class GateMachine(RuleBasedStateMachine):
    """Two tenants, two keys of each, and trees of runs. Engines keep their word."""

    flights = Bundle("flights")

    def __init__(self) -> None:
        super().__init__()
        self.gate = QuotaGate(PRICES, lease_tokens=64, run_idle_s=1e9)
        self.now = 0.0
        self.wall = NOON
        self.tenant_limits = {tenant: Limits() for tenant in TENANTS}
        self.key_limits = {(tenant, key): Limits() for tenant in TENANTS for key in KEYS if key is not None}
        self.shadows = dict.fromkeys(TENANTS, False)
        self.open: list[Flight] = []
        self.accounts: dict[int, Account] = {}
        self.ended: defaultdict[int, Sum] = defaultdict(Sum)
        self.whose: dict[int, str] = {}
        self.taken: dict[int, tuple[int, int]] = {}

    # What happens.

    @rule(
        target=flights,
        tenant=st.sampled_from(TENANTS),
        key=st.sampled_from(KEYS),
        job=calls,
        lineage=st.sampled_from(LINEAGES),
    )
    def come(self, tenant: str, key: str | None, job: InferenceJob, lineage: tuple[str, ...]) -> Flight | None:
        caller = self.caller(tenant, key)
        before = self.trace(caller)
        try:
            permit = self.gate.admit(job, caller, lineage, self.now, self.wall)
        except GatewayError as refusal:
            assert not caller.tenant.shadow
            assert self.trace(caller) == before
            self.comes_back_when_told_to(refusal, job, caller, lineage)
            return None
        flight = Flight(permit, job, tenant)
        if permit.tenant is not None:
            self.open.append(flight)
        for account in [*permit.leased_accounts, *permit.charge_only_accounts]:
            self.accounts.setdefault(id(account), account)
            self.whose[id(account)] = tenant
        self.is_lawful(flight)
        return flight

    @rule(flight=flights, tokens=st.integers(1, 200))
    def write(self, flight: Flight | None, tokens: int) -> None:
        """As dispatch does: ask before the lease is used up, stop where nothing more is granted."""
        if flight is None or flight not in self.open:
            return
        permit = flight.permit
        for _ in range(tokens):
            if permit.granted_tokens - flight.written <= 8:
                before = permit.granted_tokens
                assert self.gate.renew(permit, flight.written) == permit.granted_tokens >= before
            if flight.written >= min(permit.granted_tokens, permit.max_output):
                if permit.granted_tokens < permit.max_output:
                    assert isinstance(self.gate.exhausted_error(permit), RunBudgetExhausted | TenantBudgetExhausted)
                return
            flight.written += 1

    @rule(flight=consumes(flights), ran=st.booleans(), cached=st.integers(0, 50))
    def end(self, flight: Flight | None, ran: bool, cached: int) -> None:
        if flight is None or flight not in self.open:
            return
        self.open.remove(flight)
        job, permit = flight.job, flight.permit
        prompt = job.footprint.prompt.high
        usage = Usage(prompt, min(cached, prompt), flight.written) if ran else None
        cost = self.gate.settle(permit, usage, self.now, self.wall)
        price = PRICES.get(job.route.model)
        assert cost == (
            None if price is None else 0 if usage is None else price.nanos(prompt, min(cached, prompt), flight.written)
        )
        for account in [*permit.leased_accounts, *permit.charge_only_accounts]:
            if ran:
                self.ended[id(account)].tokens += prompt + flight.written
                self.ended[id(account)].nanos += cost or 0

    @rule(seconds=st.floats(0.0, 90.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds

    @rule(days=st.sampled_from([1, 1, 20]))
    def sleep(self, days: int) -> None:
        self.now += days * 86_400
        self.wall += days * 86_400

    @rule(tenant=st.sampled_from(TENANTS), limits=limits)
    def change_a_tenant(self, tenant: str, limits: Limits) -> None:
        self.tenant_limits[tenant] = limits

    @rule(tenant=st.sampled_from(TENANTS), key=st.sampled_from(("k1", "k2")), limits=limits)
    def change_a_key(self, tenant: str, key: str, limits: Limits) -> None:
        self.key_limits[tenant, key] = limits

    @precondition(lambda self: not self.open)
    @rule(tenant=st.sampled_from(TENANTS))
    def only_report(self, tenant: str) -> None:
        self.shadows[tenant] = not self.shadows[tenant]

    # What holds.

    @invariant()
    def no_account_exceeds_its_ceiling(self) -> None:
        """One whose ceiling was lowered below what is taken of it takes no more, unless it is only reported on."""
        for name, account in self.accounts.items():
            before = self.taken.get(name, (0, 0))
            self.taken[name] = account.committed_tokens, account.committed_nanos
            if not self.shadows[self.whose[name]]:
                assert account.committed_tokens <= max(account.token_ceiling, before[0])
                assert account.committed_nanos <= max(account.nano_ceiling, before[1])

    @invariant()
    def leases_are_those_of_jobs_in_flight(self) -> None:
        leased: defaultdict[int, Sum] = defaultdict(Sum)
        for flight in self.open:
            for account in flight.permit.leased_accounts:
                leased[id(account)].tokens += flight.permit.leased_tokens
                leased[id(account)].nanos += flight.permit.leased_nanos
        for name, account in self.accounts.items():
            assert (account.leased_tokens, account.leased_nanos) == (leased[name].tokens, leased[name].nanos)

    @invariant()
    def what_is_spent_is_the_sum_of_ends(self) -> None:
        assert (self.gate.overrun_tokens, self.gate.overrun_nanos) == (0, 0)
        for name, account in self.accounts.items():
            assert (account.spent_tokens, account.spent_nanos) == (self.ended[name].tokens, self.ended[name].nanos)

    def teardown(self) -> None:
        for flight in self.open:
            self.gate.settle(flight.permit, None, self.now, self.wall)
        for account in self.accounts.values():
            assert (account.leased_tokens, account.leased_nanos, account.active_jobs) == (0, 0, 0)
        for tenant in TENANTS:
            for key in KEYS:
                books = self.gate._tenants.get(tenant) if key is None else self.gate._keys.get(f"{tenant}-{key}")
                assert books is None or books.quotas.in_flight == 0

    # Help.

    def caller(self, tenant: str, key: str | None) -> Caller:
        api_key = None
        if key is not None:
            key_limits = self.key_limits[tenant, key]
            api_key = ApiKey(key_id=f"{tenant}-{key}", tenant=tenant, secret_hash=b"", limits=key_limits)
        return Caller(Tenant(name=tenant, limits=self.tenant_limits[tenant], shadow=self.shadows[tenant]), api_key)

    def trace(self, caller: Caller) -> object:
        """All that a refusal might change, as far as it can be asked for."""
        return (
            self.gate.rate_limit_status(caller, self.now),
            [(id(one), one.committed_tokens, one.committed_nanos, one.active_jobs) for one in self.accounts.values()],
            self.gate.run_count,
        )

    def comes_back_when_told_to(
        self, refusal: GatewayError, job: InferenceJob, caller: Caller, lineage: tuple[str, ...]
    ) -> None:
        """If nobody else comes, a bucket has enough exactly then, and not much before."""
        if not isinstance(refusal, RateLimited) or refusal.retry_after_s is None:
            return
        at = self.now + refusal.retry_after_s
        if refusal.retry_after_s > 0.1:
            try:
                self.gate.admit(job, caller, lineage, at - 0.05, self.wall)
            except GatewayError:
                pass
            else:
                raise AssertionError("let in before the time it was told")
        self.now, self.wall = at, self.wall + refusal.retry_after_s
        try:
            permit = self.gate.admit(job, caller, lineage, self.now, self.wall)
        except RateLimited as again:
            raise AssertionError(f"came back when told to, and was told to wait for {again.retry_after_s}") from again
        except GatewayError:
            return  # for another reason: a day may have ended, or too many are in flight
        self.gate.settle(permit, None, self.now, self.wall)

    def is_lawful(self, flight: Flight) -> None:
        permit, job = flight.permit, flight.job
        if permit.tenant is None or not permit.leased_accounts:
            return
        assert 1 <= permit.output_cap <= job.token_budget
        assert 1 <= permit.granted_tokens <= permit.max_output
        assert permit.leased_tokens == job.footprint.prompt.high + permit.granted_tokens
        for account in permit.leased_accounts:
            assert account.committed_tokens <= account.token_ceiling <= UNBOUNDED
            assert account.committed_nanos <= account.nano_ceiling or not permit.leased_nanos


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
