"""When the controller bounds how long jobs may be held back."""

from inferry.domain.jobs import Estimate, Footprint
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.workers import Capacity
from inferry.scheduling.capacity.controller import CapacityController

CHUNK = 2048
NOW = 100.0


def a_controller() -> CapacityController:
    """A controller that knows its costs and has 20 waiting batch jobs in its model."""
    controller = CapacityController(DEFAULT_LANES, Capacity(sequences=256, kv_tokens=100_000), CHUNK)
    for number in range(40):
        prompt_tokens = 500 * (number % 7)
        controller.costs.add(1.0, 1.0, 100, 100 * (1 + number % 5), prompt_tokens)
    footprint = Footprint(Estimate.exactly(2048), Estimate.exactly(0), Estimate.exactly(10))
    for _ in range(20):
        controller.arrived(Lane.P2, footprint, NOW)
    controller.sent(Lane.P2, 2048, NOW)  # the worker is not idle
    return controller


def end_stream(controller: CapacityController, waited_s: float, tokens: int = 1) -> None:
    controller.sent(Lane.P0, 10, NOW)
    stream = controller.first_token(Lane.P0, 10, NOW - waited_s, NOW)
    stream.tokens = tokens
    controller.ended(Lane.P0, stream, NOW)


def test_holding_is_not_bounded_while_streams_meet_their_targets() -> None:
    controller = a_controller()
    assert controller.capacity(NOW).direct is None
    end_stream(controller, 0.1)
    assert controller.capacity(NOW).direct is None


def test_once_streams_miss_their_targets_the_controller_says_how_long_jobs_would_wait_in_the_engine_alone() -> None:
    controller = a_controller()
    for _ in range(3):
        end_stream(controller, 60.0)
    direct = controller.capacity(NOW).direct
    assert direct is not None
    assert direct.waits_s[Lane.P2] > direct.waits_s[Lane.P0]
    assert direct.waits_s[Lane.P2] > 0.0
    assert direct.chunk_tokens == CHUNK
    for _ in range(10):
        end_stream(controller, 0.1)
    assert controller.capacity(NOW).direct is None, "they meet them again"


def test_a_pooled_job_in_the_model_has_no_output() -> None:
    controller = a_controller()
    pooled = Footprint(Estimate.exactly(100), Estimate.exactly(0), Estimate.exactly(0))
    end_stream(controller, 0.1, tokens=5)
    fresh = CapacityController(DEFAULT_LANES, Capacity(sequences=256, kv_tokens=100_000), CHUNK)
    for one in (controller, fresh):
        end_stream(one, 0.1, tokens=5)
        one.arrived(Lane.P1, pooled, NOW)
        one.arrived(Lane.P1, pooled, NOW)
    assert fresh.capacity(NOW).direct is None


def test_a_late_first_token_counts_though_the_last_token_is_in_time() -> None:
    controller = a_controller()
    for _ in range(3):
        end_stream(controller, 1.0, tokens=1000)
    assert controller.capacity(NOW).direct is not None
