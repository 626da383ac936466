"""Fairness between tenants over the last minutes, and a scrape that does not grow with tenants."""

import msgspec
import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Done, FinishReason, Usage
from inferry.observe import tenant_service
from inferry.observe.history import MetricHistory
from inferry.observe.metrics import Metrics
from inferry.observe.tenant_service import MAX_TENANTS, SLICE_S, SLICES, TenantService
from support.builders import a_job


def test_equal_service_is_fair_and_one_tenant_alone_of_many_is_not() -> None:
    service = TenantService()
    assert service.fairness(0.0) == 1.0
    for tenant in "abcd":
        service.add(tenant, 100, 10.0)
    assert service.fairness(10.0) == pytest.approx(1.0)
    service.add("a", 1_000_000, 10.0)
    assert service.fairness(10.0) == pytest.approx(0.25, abs=0.01)


def test_service_counts_in_proportion_to_weights() -> None:
    service = TenantService()
    service.weight_of = {"a": 3.0, "b": 1.0}.__getitem__
    service.add("a", 300, 0.0)
    service.add("b", 100, 0.0)
    assert service.fairness(0.0) == pytest.approx(1.0)


def test_service_is_forgotten_after_the_last_minutes() -> None:
    service = TenantService()
    service.add("a", 100, 30.0)
    service.add("b", 100, 30.0 + SLICE_S)
    assert service.tokens(30.0 + SLICE_S * (SLICES - 1)) == {"a": 100, "b": 100}
    assert service.tokens(30.0 + SLICE_S * SLICES) == {"b": 100}
    assert service.tokens(30.0 + SLICE_S * 1000) == {}


def test_the_number_of_tenants_is_bounded() -> None:
    service = TenantService()
    for number in range(MAX_TENANTS + 100):
        service.add(f"t{number}", 1, 0.0)
    assert len(service.tokens(0.0)) == MAX_TENANTS
    assert tenant_service.SLICES * MAX_TENANTS <= 50_000


def calls_of_tenants(count: int) -> Metrics:
    metrics = Metrics(["m"], ["w"])
    metrics.watch({"inferry_tenant_fairness_index": lambda: metrics.tenants.fairness(1.0)})
    for number in range(count):
        attempt = Attempt(a_job(tenant=f"tenant-{number}", run_id=f"run-{number}"))
        metrics.queued(attempt, 0.0)
        attempt.ended(Done(attempt.job.job_id, FinishReason.STOP, Usage(1, 0, 1)), 1.0)
        attempt.ledger_entry = msgspec.structs.replace(attempt.entry(1.0), key_id=f"key-{number}")
        metrics.ended(attempt, 1.0)
    return metrics


def test_a_scrape_has_as_many_lines_with_a_thousand_tenants_as_with_one() -> None:
    one, many = calls_of_tenants(1), calls_of_tenants(1000)
    lines = many.render()[0].decode().splitlines()
    assert len(lines) == len(one.render()[0].decode().splitlines())
    assert len(lines) < 2000
    assert not any("tenant-" in line or "run-" in line or "key-" in line for line in lines)


def test_a_sample_keeps_as_many_series_with_a_thousand_tenants_as_with_one() -> None:
    one, many = calls_of_tenants(1), calls_of_tenants(1000)
    assert len(many.readings()) == len(one.readings())
    history = MetricHistory(many)
    history.sample(0.0)
    assert history.latest("inferry_tenant_fairness_index") == pytest.approx(1.0)


def test_a_scrape_looks_at_every_tenant_once() -> None:
    many = calls_of_tenants(1000)
    asked: list[str] = []
    many.tenants.weight_of = lambda tenant: asked.append(tenant) or 1.0  # type: ignore[func-returns-value]
    many.render()
    assert len(asked) == len(set(asked)) == 1000
