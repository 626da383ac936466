"""Budgets by lease: run, day and month, in tokens and money."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.builders import DAY, NOON, a_call, a_caller, used
from inferry.admission.budgets import UNBOUNDED, Tariff, format_money, lease_size, utc_day, utc_month
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.tenants import Limits
from inferry.domain.values import replace

PRICES = {"m": Price(input=1.0, output=10.0)}
"""A thousand billionths for a token of a prompt, ten thousand for one of an answer."""


def admit(
    gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, *lineage: str, at: float = 0.0, wall: float = NOON
) -> Permit:
    job = a_call() if job is None else job
    return gate.admit(job, caller, lineage or (job.run_id,), at, wall)


def refusal(gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, *lineage: str) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        admit(gate, caller, job, *lineage)
    return caught.value


def write_all(gate: QuotaGate, permit: Permit, tokens: int) -> int:
    """How much of so many tokens it gets to write, one by one, as a stream does."""
    written = 0
    while written < tokens:
        if written + 1 > permit.granted_tokens and gate.renew(permit, written) <= written:
            break
        written += 1
    return written


def spent(gate: QuotaGate, run: str = "run", tenant: str = "a") -> tuple[int, int]:
    line = gate.run_report(tenant, run)
    assert line is not None
    return line.spent_tokens, line.leased_tokens


# -- leases ----------------------------------------------------------------------------------------------------------


def test_a_job_leases_the_upper_bound_of_its_prompt_and_a_first_part_of_its_output() -> None:
    gate, caller = QuotaGate({}, lease_tokens=100), a_caller(run_token_ceiling=10_000)
    permit = admit(gate, caller, a_call(10, 500, prompt_high=40))
    assert (permit.granted_tokens, permit.output_cap) == (100, 500)
    assert spent(gate) == (0, 140)
    gate.settle(permit, used(10, 50), 0.0, NOON)
    assert spent(gate) == (60, 0)


def test_a_short_job_leases_at_most_its_output_limit() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=10_000)
    permit = admit(gate, caller, a_call(10, 20, choices=3))
    assert permit.granted_tokens == 60
    assert gate.renew(permit, 60) == 60


def test_a_lease_is_renewed_in_parts() -> None:
    gate, caller = QuotaGate({}, lease_tokens=100), a_caller(run_token_ceiling=10_000)
    permit = admit(gate, caller, a_call(10, 250))
    assert gate.renew(permit, 90) == 200
    assert gate.renew(permit, 190) == 250
    assert spent(gate) == (0, 260)


def test_a_delta_larger_than_the_lease_is_covered_where_there_is_headroom() -> None:
    gate, caller = QuotaGate({}, lease_tokens=16), a_caller(run_token_ceiling=10_000)
    permit = admit(gate, caller, a_call(10, 500))
    assert gate.renew(permit, 300) == 316


def test_output_is_capped_by_the_remaining_budget() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=100)
    permit = admit(gate, caller, a_call(40, 500))
    assert permit.output_cap == 60
    assert write_all(gate, permit, 500) == 60
    error = gate.exhausted_error(permit)
    assert isinstance(error, RunBudgetExhausted)
    gate.settle(permit, used(40, 60), 0.0, NOON)
    assert spent(gate) == (100, 0)


def test_choices_share_the_remaining_budget() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=100)
    permit = admit(gate, caller, a_call(40, 500, choices=8))
    assert permit.output_cap == 7
    assert write_all(gate, permit, 500) == 56
    gate.settle(permit, None, 0.0, NOON)
    assert isinstance(refusal(gate, caller, a_call(93, 500, choices=8)), RunBudgetExhausted)


def test_a_prompt_is_admitted_if_one_output_token_fits_beside_it() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=100)
    error = refusal(gate, caller, a_call(100, 5))
    assert error.message == (
        "the run's ceiling of 100 tokens leaves too little for this call's prompt and one output token: "
        "0 spent, 0 leased to calls in flight"
    )
    permit = admit(gate, caller, a_call(99, 5))
    assert (permit.output_cap, permit.granted_tokens) == (1, 1)


def test_a_refusal_names_ceiling_spending_and_leases() -> None:
    gate, caller = QuotaGate(PRICES), a_caller(day_money_ceiling=0.002)
    gate.settle(admit(gate, caller, a_call(100, 50)), used(100, 50), 0.0, NOON)
    admit(gate, caller, a_call(100, 100))
    error = refusal(gate, caller, a_call(1_200, 50))
    assert isinstance(error, TenantBudgetExhausted)
    assert error.message == (
        "the tenant's ceiling of 0.002 a day leaves too little for this call's prompt and one output token: "
        "0.0006 spent, 0.000260002 leased to calls in flight"
    )


def test_leases_shrink_with_the_remaining_budget() -> None:
    gate, caller = QuotaGate({}, lease_tokens=256), a_caller(run_token_ceiling=6_410)
    permits = [admit(gate, caller, a_call(10, 5_000)) for _ in range(3)]
    assert [permit.granted_tokens for permit in permits] == [100, 98, 96]
    assert gate.renew(permits[0], 90) == 195
    few = a_caller("b", run_token_ceiling=40)
    assert [admit(gate, few, a_call(10, 50)).granted_tokens for _ in range(2)] == [16, 4]


def test_sixty_four_calls_share_a_budget_smaller_than_their_full_leases() -> None:
    gate, caller = QuotaGate({}, lease_tokens=256), a_caller(run_token_ceiling=4_096)
    permits = [admit(gate, caller, a_call(10, 500)) for _ in range(64)]
    assert all(permit.granted_tokens >= 16 for permit in permits)


def test_a_returned_lease_is_available_to_other_jobs() -> None:
    gate, caller = QuotaGate({}, lease_tokens=64), a_caller(run_token_ceiling=200)
    long, short = admit(gate, caller, a_call(10, 150)), admit(gate, caller, a_call(10, 60))
    assert write_all(gate, short, 60) == 60
    assert write_all(gate, long, 150) == 120
    assert isinstance(gate.exhausted_error(long), RunBudgetExhausted)
    gate.settle(short, used(10, 20), 0.0, NOON)
    assert write_all(gate, long, 150) == 150
    gate.settle(long, used(10, 150), 0.0, NOON)
    assert spent(gate) == (190, 0)


def test_a_call_without_a_limit_continues_while_there_is_budget() -> None:
    gate, caller = QuotaGate({}, lease_tokens=64), a_caller(run_token_ceiling=1_000)
    permit = admit(gate, caller, a_call(10, 100, named=False))
    assert permit.output_cap == 100
    assert write_all(gate, permit, 5_000) == 990
    assert isinstance(gate.exhausted_error(permit), RunBudgetExhausted)


def test_usage_beyond_the_lease_is_charged_up_to_the_ceiling_and_the_rest_is_counted() -> None:
    gate, caller = QuotaGate({}, lease_tokens=20), a_caller(run_token_ceiling=100)
    gate.settle(admit(gate, caller, a_call(10, 20)), used(30, 30), 0.0, NOON)
    assert (spent(gate), gate.overrun_tokens) == ((60, 0), 0)
    gate.settle(admit(gate, caller, a_call(10, 20)), used(50, 30), 0.0, NOON)
    assert (spent(gate), gate.overrun_tokens) == ((100, 0), 40)


def test_a_job_that_never_ran_is_charged_nothing() -> None:
    gate, caller = QuotaGate(PRICES), a_caller(run_token_ceiling=1_000, day_money_ceiling=1.0)
    assert gate.settle(admit(gate, caller), None, 0.0, NOON) == 0
    assert spent(gate) == (0, 0)
    assert [(line.spent_nanos, line.leased_nanos) for line in gate.report("a")] == [(0, 0)]


def test_a_settled_permit_is_not_renewed_nor_charged_again() -> None:
    gate, caller = QuotaGate(PRICES, lease_tokens=16), a_caller(run_token_ceiling=1_000)
    permit = admit(gate, caller, a_call(10, 100))
    cost = gate.settle(permit, used(10, 5), 0.0, NOON)
    gate.renew(permit, 16)
    assert gate.settle(permit, used(10, 5), 0.0, NOON) == cost
    assert spent(gate) == (15, 0)


# -- trees -----------------------------------------------------------------------------------------------------------


def test_a_run_ceiling_covers_the_whole_run_tree() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=100)
    gate.settle(admit(gate, caller, a_call(10, 30), "leaf", "middle", "root"), used(10, 30), 0.0, NOON)
    gate.settle(admit(gate, caller, a_call(10, 20), "other", "root"), used(10, 20), 0.0, NOON)
    assert [spent(gate, run)[0] for run in ("leaf", "middle", "other", "root")] == [40, 40, 30, 70]
    permit = admit(gate, caller, a_call(10, 50), "new", "root")
    assert permit.output_cap == 20
    assert isinstance(refusal(gate, caller, a_call(10, 5), "root"), RunBudgetExhausted)
    admit(gate, caller, a_call(10, 50), "another root")


def test_spending_of_a_run_counts_for_a_parent_that_it_gets_later() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=100)
    gate.settle(admit(gate, caller, a_call(10, 30), "leaf", "b"), used(10, 30), 0.0, NOON)
    in_flight = admit(gate, caller, a_call(1, 1), "b")
    for _ in range(2):
        gate.settle(admit(gate, caller, a_call(4, 1), "leaf", "b", "a"), used(4, 1), 0.0, NOON)
    gate.settle(in_flight, used(1, 1), 0.0, NOON)
    assert [spent(gate, run)[0] for run in ("leaf", "b", "a")] == [50, 52, 52]


def test_runs_with_the_same_name_of_two_tenants_have_separate_accounts() -> None:
    gate = QuotaGate({})
    gate.settle(admit(gate, a_caller("a", run_token_ceiling=50)), used(10, 40), 0.0, NOON)
    assert isinstance(refusal(gate, a_caller("a", run_token_ceiling=50)), RunBudgetExhausted)
    admit(gate, a_caller("b", run_token_ceiling=50))


def test_calls_of_several_keys_in_one_run_have_the_ceilings_of_their_keys() -> None:
    gate = QuotaGate({}, lease_tokens=10)
    tight = a_caller(run_token_ceiling=200, key=Limits(run_token_ceiling=50), key_id="k1")
    wide = a_caller(run_token_ceiling=200, key=Limits(), key_id="k2")
    first = admit(gate, tight, a_call(10, 100))
    second = admit(gate, wide, a_call(10, 100))
    assert (first.output_cap, second.output_cap) == (40, 100)
    assert write_all(gate, first, 100) == 20  # fifty less both prompts and the other's ten
    assert write_all(gate, second, 100) == 100


def test_a_call_without_a_run_id_leaves_no_account() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=100)
    job = a_call()
    job = replace(job, run_id=job.job_id)
    permit = gate.admit(job, caller, (job.job_id,), 0.0, NOON)
    assert gate.run_report("a", job.job_id) is not None
    gate.settle(permit, used(), 0.0, NOON)
    assert gate.run_report("a", job.job_id) is None


# -- days and months -------------------------------------------------------------------------------------------------


def test_a_job_is_charged_to_the_day_and_month_of_its_lease() -> None:
    gate, caller = QuotaGate({}), a_caller(day_token_ceiling=100, month_token_ceiling=250)
    late = admit(gate, caller, a_call(10, 50), wall=NOON)
    next_day = admit(gate, caller, a_call(10, 90), wall=NOON + DAY)
    assert next_day.output_cap == 90
    gate.settle(late, used(10, 50), DAY, NOON + DAY)
    assert [(line.kind, line.spent_tokens, line.leased_tokens) for line in gate.report("a")] == [
        ("day", 0, 26),
        ("month", 60, 26),
    ]
    gate.settle(next_day, used(10, 90), DAY, NOON + DAY)
    day_after = admit(gate, caller, a_call(10, 90), wall=NOON + 2 * DAY)
    assert day_after.output_cap == 80
    gate.settle(day_after, used(10, 80), DAY, NOON)
    assert isinstance(refusal_at(gate, caller, NOON + 3 * DAY), TenantBudgetExhausted)
    admit(gate, caller, a_call(10, 90), wall=NOON + 17 * DAY)  # April


def refusal_at(gate: QuotaGate, caller: Caller, wall: float) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        admit(gate, caller, wall=wall)
    return caught.value


def test_a_clock_set_back_slightly_at_midnight_opens_no_new_day() -> None:
    gate, caller = QuotaGate({}), a_caller(day_token_ceiling=100)
    midnight = NOON + DAY / 2
    gate.settle(admit(gate, caller, a_call(10, 90), wall=midnight + 1), used(10, 90), 0.0, midnight)
    assert isinstance(refusal_at(gate, caller, midnight - 5), TenantBudgetExhausted)
    assert isinstance(refusal_at(gate, caller, midnight + 5), TenantBudgetExhausted)


@given(st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1)))
def test_months_are_calendar_months(moment: datetime) -> None:
    wall = moment.replace(tzinfo=UTC).timestamp()
    assert utc_month(utc_day(wall)) == 12 * moment.year + moment.month - 1


def test_keys_have_their_own_daily_and_monthly_accounts() -> None:
    gate = QuotaGate({})
    one = a_caller(day_token_ceiling=100, key=Limits(day_token_ceiling=60, month_token_ceiling=1_000), key_id="k1")
    gate.settle(admit(gate, one, a_call(10, 50)), used(10, 50), 0.0, NOON)
    error = refusal(gate, one, a_call(10, 5))
    assert error.message == "the key's ceiling of 60 tokens a day is reached: 60 spent, 0 leased to calls in flight"
    other = a_caller(day_token_ceiling=100, key=Limits(day_token_ceiling=60), key_id="k2")
    assert admit(gate, other, a_call(10, 50)).output_cap == 30
    assert [(line.key_id, line.kind, line.spent_tokens, line.token_ceiling) for line in gate.report("a")] == [
        (None, "day", 60, 100),
        ("k1", "day", 60, 60),
        ("k1", "month", 60, 1_000),
        ("k2", "day", 0, 60),
    ]


# -- money -----------------------------------------------------------------------------------------------------------


def test_a_money_ceiling_binds_before_a_looser_token_ceiling() -> None:
    gate, caller = QuotaGate(PRICES), a_caller(run_money_ceiling=0.001, run_token_ceiling=1_000_000)
    permit = admit(gate, caller, a_call(500, 1_000))
    assert permit.output_cap == 49  # and not fifty: a lease is rounded up
    written = write_all(gate, permit, 1_000)
    assert 40 <= written <= 49
    cost = gate.settle(permit, used(500, written), 0.0, NOON)
    assert cost == 500_000 + 10_000 * written
    line = gate.run_report("a", "run")
    assert line is not None
    assert (line.spent_nanos, line.leased_nanos, line.nano_ceiling) == (cost, 0, 1_000_000)


def test_prompts_are_leased_at_the_higher_price_and_charged_at_the_actual_one() -> None:
    gate = QuotaGate({"m": Price(input=2.0, cached_input=0.5, output=0.0), "odd": Price(input=1.0, cached_input=4.0)})
    caller = a_caller(day_money_ceiling=1.0)
    permit = admit(gate, caller, a_call(100, 10))
    assert permit.leased_nanos == 200_001
    assert gate.settle(permit, used(100, 10, cached=40), 0.0, NOON) == 140_000
    assert admit(gate, caller, a_call(100, 10, model="odd")).leased_nanos == 400_001


def test_a_model_without_a_price_costs_nothing() -> None:
    gate, caller = QuotaGate(PRICES), a_caller(day_money_ceiling=0.000001)
    permit = admit(gate, caller, a_call(1_000, 1_000, model="other"))
    assert permit.granted_tokens == 256
    assert gate.settle(permit, used(1_000, 1_000), 0.0, NOON) is None


def test_callers_without_limits_share_a_permit_and_get_the_cost() -> None:
    gate, anybody = QuotaGate(PRICES), a_caller(key=Limits(models=("m",)))
    permit = admit(gate, anybody)
    assert permit is admit(gate, anybody, a_call(5, 5))
    assert (permit.granted_tokens, permit.output_cap) == (UNBOUNDED, UNBOUNDED)
    assert gate.renew(permit, 10**6) == UNBOUNDED
    assert gate.settle(permit, used(10, 20), 0.0, NOON) == 210_000
    assert gate.settle(permit, None, 0.0, NOON) == 0
    assert gate.settle(admit(gate, anybody, a_call(model="other")), used(), 0.0, NOON) is None
    assert gate.report("a") == []


@given(st.integers(0, 10**13), st.floats(0.001, 200.0))
def test_affordable_tokens_is_the_largest_number_within_the_price(nanos: int, price: float) -> None:
    tariff = Tariff(Price(output=price))
    tokens = tariff.affordable_tokens(nanos)
    assert tokens == 0 or tariff.output(tokens) <= nanos
    assert tariff.output(tokens + 2) > nanos


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5), st.floats(0.0, 50), st.floats(0.0, 50))
def test_a_lease_never_costs_less_than_its_usage(
    prompt: int, output: int, cached: int, money_account: float, cheap: float
) -> None:
    price = Price(input=money_account, cached_input=cheap, output=money_account / 3)
    tariff = Tariff(price)
    if price.is_per_token:
        leased = tariff.prompt(prompt) + tariff.output(output)
        assert price.nanos(prompt, min(cached, prompt), output) <= leased


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_a_lease_is_a_fraction_of_the_remaining_budget_or_its_rest(left: int, most: int) -> None:
    got = lease_size(left, most)
    assert got <= min(left, most)
    assert got <= max(16, left // 64)
    assert bool(got) == bool(left)


def test_money_is_formatted_without_trailing_zeros() -> None:
    assert [format_money(nanos) for nanos in (0, 1, NANOS_PER_UNIT, 12 * NANOS_PER_UNIT + NANOS_PER_UNIT // 2)] == [
        "0",
        "0.000000001",
        "1",
        "12.5",
    ]
