"""What parsing gets from the catalog: cards, or why there are none, and what a valid call is resolved to."""

import pytest

from inferry.dispatch.model_catalog import ModelCatalog
from inferry.dispatch.pool import Pool
from inferry.domain.callers import ANONYMOUS
from inferry.domain.clock import SystemClock
from inferry.domain.errors import NoWorker
from inferry.domain.jobs import Estimate, Footprint
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ports import ModelCard
from inferry.domain.routes import RouteKey
from inferry.domain.values import replace
from inferry.prediction.estimator import Estimator

SPLIT = DEFAULT_LANES | {Lane.P2: replace(DEFAULT_LANES[Lane.P2], long_output_tokens=20, ttft_ms_per_1k_tokens=50)}


def a_catalog() -> ModelCatalog:
    clock = SystemClock()
    return ModelCatalog(SPLIT, Pool([], clock), {}, Estimator(), clock)


def test_a_gateway_without_workers_does_not_say_that_a_model_does_not_exist() -> None:
    with pytest.raises(NoWorker) as refused:
        a_catalog().card("m", None)
    assert refused.value.retry_after_s is not None


def test_a_call_is_resolved_by_its_estimates_and_the_policy_of_its_lane() -> None:
    card, prompt = ModelCard(name="m", can_resume=True), Estimate.exactly(1000)
    call = a_catalog().resolve(
        ANONYMOUS, card, Lane.P2, prompt, max_wait_ms=None, ttft_ms_per_1k=None, body=b"{}", budget=30, hint=7
    )
    assert call.footprint == Footprint(prompt, Estimate.exactly(0), Estimate.exactly(30))
    assert (call.prefix, call.route) == ((), RouteKey("m", length="long"))
    assert (call.max_wait_s, call.ttft_allowance_s) == (30.0, 0.05)
    assert call.can_resume, "jobs of the lane may be preempted"


def test_a_pooled_call_has_no_output_and_a_queue_of_its_own() -> None:
    card, prompt = ModelCard(name="m", can_resume=True), Estimate.exactly(1000)
    call = a_catalog().resolve(ANONYMOUS, card, Lane.P2, prompt, max_wait_ms=0, ttft_ms_per_1k=0)
    assert call.footprint == Footprint(prompt, Estimate.exactly(0), Estimate.exactly(0))
    assert (call.prefix, call.route) == ((), RouteKey("m", pooled=True))
    assert (call.max_wait_s, call.ttft_allowance_s) == (0.0, 0.0)
    assert not call.can_resume
