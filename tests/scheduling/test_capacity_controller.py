"""The capacity controller: its limits for given observations, and on an engine with known costs."""

import random
from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, EngineCounts, Load
from inferry.scheduling.capacity.controller import (
    IDLE_AFTER_S,
    INITIAL_PREFILL_TOKENS,
    MIN_PREFILL_FRACTION,
    MIN_SLACK_ITLS,
    CapacityController,
    Stream,
)
from inferry.scheduling.capacity.step_costs import StepCostModel

P0, P1, P2 = Lane.P0, Lane.P1, Lane.P2
LIMITS = Capacity(sequences=256, kv_tokens=100_000)
STEP_S = 0.010
PROMPT_S = 25e-6


class Engine:
    """An engine with known costs: steps of 5 ms and 0.1 ms a sequence, 25 µs a prompt token. Time is virtual."""

    def __init__(self, controller: CapacityController) -> None:
        self.controller = controller
        self.now = 0.0
        self.streams: list[tuple[Lane, Stream]] = []

    def start(self, lane: Lane, prompt: int = 500, waited_s: float = 0.0) -> Stream:
        """Compute a prompt, all by itself."""
        self.controller.sent(lane, prompt, self.now)
        arrived_at = self.now - waited_s
        self.now += prompt * PROMPT_S
        stream = self.controller.first_token(lane, prompt, arrived_at, self.now)
        self.streams.append((lane, stream))
        return stream

    def decode(self, seconds: float, prompt_tokens_per_s: float = 0.0) -> None:
        """Decode everybody, with batch prompts beside it: short ones, which end with their first token."""
        until = self.now + seconds
        debt = 0.0
        while self.now < until:
            step_s = 0.005 + 0.0001 * len(self.streams)
            debt += prompt_tokens_per_s * step_s / (1 - prompt_tokens_per_s * PROMPT_S)
            prompt, debt = int(debt), debt - int(debt)
            if prompt:
                self.controller.sent(P2, prompt, self.now)
            self.now += step_s + prompt * PROMPT_S
            for _, stream in self.streams:
                stream.tokens += 1
            if prompt:
                self.controller.ended(P2, self.controller.first_token(P2, prompt, self.now, self.now), self.now)
            self.controller.capacity(self.now)

    def end_all(self) -> None:
        for lane, stream in self.streams:
            self.controller.ended(lane, stream, self.now)
        self.streams = []


def an_engine(streams: int = 10, lane: Lane = P0) -> Engine:
    """An engine whose costs the controller has learned, with so many streams of the lane that are on time."""
    engine = Engine(CapacityController(DEFAULT_LANES, LIMITS, 2048))
    for number in range(6):
        for _ in range(2 + 3 * number):
            engine.start(P1)
        engine.decode(1.0, prompt_tokens_per_s=3000.0 * number)
        engine.end_all()
    for _ in range(streams):
        engine.start(lane)
    engine.controller.capacity(engine.now)
    return engine


def test_before_costs_are_known_only_prefill_is_bounded() -> None:
    capacity = CapacityController(DEFAULT_LANES, LIMITS).capacity(0.0)
    assert capacity == Capacity(256, 95_000, INITIAL_PREFILL_TOKENS)


def test_costs_are_learned_from_observed_traffic() -> None:
    costs = an_engine().controller.costs
    assert costs.prompt_s == pytest.approx(PROMPT_S, rel=0.25)
    assert costs.step_s(10) == pytest.approx(0.006, rel=0.25)


def test_prompts_do_not_look_free_where_every_step_is_full_of_them() -> None:
    dice = random.Random(3)
    costs = StepCostModel()
    for streams in range(3, 63, 3):
        steps = dice.choice((8, 9, 9, 10))
        prompt_tokens = steps * (2048 - streams) * dice.uniform(0.97, 1.03)
        costs.add(0.5, 0.5, steps, steps * streams, prompt_tokens)
        assert 0.6 * 0.5 / prompt_tokens < costs.prompt_s < 1.3 * 0.5 / prompt_tokens


def counted() -> Iterator[tuple[float, EngineCounts]]:
    """What an engine with steps of 4 ms and 0.1 ms a sequence, and 20 µs a prompt token, says it has done, and when."""
    now, counts = 100.0, EngineCounts(0, 0, 0)
    dice = random.Random(1)
    for _ in range(60):
        steps, streams, prompts = dice.randint(10, 30), dice.randint(5, 40), dice.choice((0, 2_000, 20_000))
        now += steps * 0.004 + steps * streams * 0.0001 + prompts * 0.00002
        counts = EngineCounts(
            counts.steps + steps, counts.prompt_tokens + prompts, counts.output_tokens + steps * streams
        )
        yield now, counts


def test_engine_counts_give_better_costs_than_observed_output() -> None:
    controller = CapacityController(DEFAULT_LANES, Capacity())
    controller.sent(P1, 100, 100.0)
    for now, counts in counted():
        controller.observe_counts(counts, now)
    assert controller.costs.base_s == pytest.approx(0.004, rel=0.1)
    assert controller.costs.token_s == pytest.approx(0.0001, rel=0.1)
    assert controller.costs.prompt_s == pytest.approx(0.00002, rel=0.1)


@pytest.mark.parametrize(("seconds", "low", "high"), [(0.5, 1.0, 1.4), (30.0, 1.8, 2.0)])
def test_capacity_is_stated_in_the_gateways_count_once_enough_prompts_were_counted(
    seconds: float, low: float, high: float
) -> None:
    """The gateway takes prompts to be twice as long as what the engine computes of them."""
    rates = []
    for estimate in (1, 2):
        controller = CapacityController(DEFAULT_LANES, Capacity())
        now, counts = 100.0, EngineCounts(0, 0, 0)
        controller.sent(P1, 100, now)
        stream = controller.first_token(P1, 100, now, now)
        controller.observe_counts(counts, now)
        while now < 100.0 + seconds:
            stream.tokens += 2
            controller.sent(P2, 500 * estimate, now)
            now += 0.1
            controller.ended(P2, controller.first_token(P2, 500 * estimate, now, now), now)
            counts = EngineCounts(counts.steps + 10, counts.prompt_tokens + 500, counts.output_tokens + 10)
            controller.observe_counts(counts, now)
        rates.append(controller.capacity(now).prefill_tokens_per_s)
    assert rates[0] is not None
    assert rates[1] is not None
    assert low <= rates[1] / rates[0] <= high


def test_streams_with_more_slack_let_more_prompts_through() -> None:
    rates = []
    for waited_s in (0.0, 0.05, 0.1, 0.15):
        engine = an_engine(streams=0)
        engine.start(P0, waited_s=waited_s)
        rates.append(engine.controller.capacity(engine.now).prefill_tokens_per_s)
    assert all(rate is not None for rate in rates)
    assert rates == sorted(rates, reverse=True, key=lambda rate: rate or 0.0)
    assert len(set(rates)) == len(rates)


def test_a_stream_that_missed_its_slo_is_ignored() -> None:
    engine = an_engine(streams=0)
    engine.start(P0)
    alone = engine.controller.capacity(engine.now).prefill_tokens_per_s
    engine.start(P0, prompt=1, waited_s=0.6)
    beside = engine.controller.capacity(engine.now).prefill_tokens_per_s
    assert alone is not None
    assert beside == pytest.approx(alone, rel=0.05)


def test_slack_withheld_from_paced_prompts_shrinks_as_they_become_urgent() -> None:
    engine = an_engine()
    controller = engine.controller
    rates = []
    for waited_s in (0.0, 1.0, 1.5, 1.9):
        controller.waiting(P1, engine.now - waited_s)
        rate = controller.capacity(engine.now).prefill_tokens_per_s
        assert rate is not None
        rates.append(rate)
    assert rates == sorted(rates)
    assert rates[-1] > 1.03 * rates[0]
    controller.waiting(P1, None)
    rate = controller.capacity(engine.now).prefill_tokens_per_s
    assert rate is not None
    assert rate <= rates[0]


def test_a_job_that_has_missed_its_target_takes_no_slack_from_streams() -> None:
    engine = an_engine()
    controller = engine.controller
    rates = []
    for waiting_since in (None, engine.now - 2.1, engine.now - 60.0):
        controller.waiting(P1, waiting_since)
        rates.append(controller.capacity(engine.now).prefill_tokens_per_s)
    assert rates == [rates[0]] * 3


def test_streams_of_a_paced_lane_withhold_less_slack_from_their_own_lane() -> None:
    """A P1 stream whose first token was nearly late must not keep the next ones of P1 from being in time."""
    engine = an_engine(streams=1)
    controller = engine.controller
    engine.start(P1, waited_s=1.7)
    rates = []
    for waiting_since in (None, engine.now - 1.9):
        controller.waiting(P1, waiting_since)
        rate = controller.capacity(engine.now).prefill_tokens_per_s
        assert rate is not None
        rates.append(rate)
    assert rates[1] > 1.05 * rates[0]


def test_a_minimum_of_slack_is_always_withheld() -> None:
    engine = an_engine(streams=0)
    controller = engine.controller
    engine.start(P0, waited_s=0.39)
    controller.waiting(P1, engine.now - 1.99)
    rate = controller.capacity(engine.now).prefill_tokens_per_s
    assert 0 < controller.slack_s(P0) < MIN_SLACK_ITLS * 0.03
    assert rate is not None
    assert rate < controller.costs.prompt_tokens_per_s * (1 - controller.costs.step_s(1) / 0.03)


def test_counts_are_as_old_as_when_they_were_read() -> None:
    """They come to the controller some time later, with what has happened since: it learns the same from them."""

    def learned(most_delay_s: float) -> StepCostModel:
        delays = random.Random(2)
        controller = CapacityController(DEFAULT_LANES, Capacity())
        controller.sent(P1, 100, 100.0)
        for now, counts in counted():
            controller.sent(P1, 1, now + delays.uniform(0.0, most_delay_s))
            controller.observe_counts(counts, now)
        return controller.costs

    at_once, later = learned(0.0), learned(0.04)
    assert later.base_s == pytest.approx(at_once.base_s, rel=1e-6)
    assert later.prompt_s == pytest.approx(at_once.prompt_s, rel=1e-6)


def test_prompts_of_a_higher_lane_do_not_raise_the_capacity_of_lower_lanes() -> None:
    engine = an_engine(lane=P1)
    controller = engine.controller
    before = controller.capacity(engine.now).prefill_tokens_per_s
    controller.sent(P0, 500, engine.now)
    after = controller.capacity(engine.now).prefill_tokens_per_s
    assert before is not None
    assert after is not None
    assert after <= before


def test_a_stricter_slo_gives_less_capacity() -> None:
    strict, loose = an_engine(lane=P0), an_engine(lane=P1)
    tight, wide = strict.controller.capacity(strict.now), loose.controller.capacity(loose.now)
    assert (tight.prefill_tokens_per_s or 0) < (wide.prefill_tokens_per_s or 0)
    strict.now += IDLE_AFTER_S
    loose.now += IDLE_AFTER_S  # P1 was there before P0's streams came; now only one lane of each is awake
    for _, stream in (*strict.streams, *loose.streams):
        stream.tokens += int(IDLE_AFTER_S / 0.020)
    tight, wide = strict.controller.capacity(strict.now), loose.controller.capacity(loose.now)
    assert (tight.prefill_tokens or 0) < (wide.prefill_tokens or 0)
    assert (tight.batch_sequences or 0) < (wide.batch_sequences or 0)


def test_streams_that_have_all_missed_their_target_hold_no_prompts_back() -> None:
    engine = an_engine()
    assert engine.controller.capacity(engine.now).prefill_tokens_per_s is not None
    engine.now += 5.0
    engine.controller.capacity(engine.now)
    assert engine.controller.slack_s(P0) == inf
    assert engine.controller.capacity(engine.now).prefill_tokens_per_s is None
    engine.start(P0)
    assert engine.controller.capacity(engine.now).prefill_tokens_per_s is not None


def test_prompts_sent_at_the_granted_rate_meet_the_slo() -> None:
    engine = an_engine()
    begun_at = engine.now
    least = inf
    for _ in range(200):
        rate = engine.controller.capacity(engine.now).prefill_tokens_per_s
        assert rate is not None
        engine.decode(0.05, prompt_tokens_per_s=min(rate, 0.9 / PROMPT_S))
        least = min(least, engine.controller.slack_s(P0))
    assert 0.2 < least < 0.6
    tokens = {stream.tokens for _, stream in engine.streams}
    assert max(tokens) * 0.030 < 1.15 * (engine.now - begun_at), (
        "gaps are as long as they were promised, not shorter than they must be"
    )


def test_slack_compensates_for_wrong_costs() -> None:
    engine = an_engine()
    engine.controller.costs.prompt_s /= 2  # believed to be twice as fast as they are
    for _ in range(100):
        rate = engine.controller.capacity(engine.now).prefill_tokens_per_s
        assert rate is not None
        engine.decode(0.05, prompt_tokens_per_s=min(rate, 0.9 / PROMPT_S))
        assert engine.controller.slack_s(P0) != inf, "no stream has lost its promise"


def test_an_unattainable_slo_leaves_prefill_a_minimum_share() -> None:
    engine = an_engine(streams=255, lane=P0)
    engine.decode(3.0)
    rate = engine.controller.capacity(engine.now).prefill_tokens_per_s
    assert rate == pytest.approx(MIN_PREFILL_FRACTION * engine.controller.costs.prompt_tokens_per_s)


def test_quiet_lanes_leave_the_worker_to_batch_work() -> None:
    engine = an_engine()
    busy = engine.controller.capacity(engine.now)
    engine.end_all()
    engine.now += IDLE_AFTER_S
    quiet = engine.controller.capacity(engine.now)
    assert busy.prefill_tokens_per_s is not None
    assert quiet.prefill_tokens_per_s is None
    assert (quiet.batch_sequences or 0) > 1.5 * (busy.batch_sequences or 0)
    engine.start(P0)
    assert engine.controller.capacity(engine.now).prefill_tokens_per_s is not None


def test_no_bound_is_smaller_than_a_typical_job() -> None:
    engine = an_engine(streams=0)
    for _ in range(50):
        engine.start(P2, prompt=60_000)
    engine.start(P0)
    assert (engine.controller.capacity(engine.now).prefill_tokens or 0) > 40_000


def test_limits_are_never_exceeded() -> None:
    limits = Capacity(sequences=3, kv_tokens=1000, prefill_tokens=700, prefill_tokens_per_s=900.0)
    engine = an_engine()
    engine.controller.limit(limits, 2048)
    capacity = engine.controller.capacity(engine.now)
    assert (capacity.sequences, capacity.kv_tokens) == (3, 950)
    assert (capacity.prefill_tokens or 0) <= 700
    assert (capacity.prefill_tokens_per_s or 0) <= 900.0
    assert (capacity.batch_sequences or 0) <= 3


def test_lanes_without_slo_need_no_controller() -> None:
    lanes = {lane: replace(policy, ttft_ms=None, itl_ms=None) for lane, policy in DEFAULT_LANES.items()}
    controller = CapacityController(lanes, LIMITS, 2048)
    engine = Engine(controller)
    for _ in range(5):
        engine.start(P0)
        engine.decode(0.5)
    assert controller.capacity(engine.now) == Capacity(256, 95_000, None, None, 256)


def test_foreign_load_is_counted() -> None:
    engine = an_engine()
    alone = engine.controller.capacity(engine.now).prefill_tokens_per_s
    engine.controller.observe(Load(running=110))
    shared = engine.controller.capacity(engine.now).prefill_tokens_per_s
    assert alone is not None
    assert shared is not None
    assert shared < 0.8 * alone


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "first", "lose", "end", "wait", "write"]),
            st.sampled_from([P0, P1, P2]),
            st.integers(1, 20_000),
        ),
        max_size=60,
    )
)
def test_capacities_are_sane_for_any_event_sequence(events: list[tuple[str, Lane, int]]) -> None:
    controller = CapacityController(DEFAULT_LANES, LIMITS, 2048)
    now = 0.0
    sent: list[tuple[Lane, int]] = []
    streams: list[tuple[Lane, Stream]] = []
    for kind, lane, amount in events:
        now += amount / 100_000
        if kind == "send":
            controller.sent(lane, amount, now)
            sent.append((lane, amount))
        elif kind == "first" and sent:
            one, prompt = sent.pop(0)
            streams.append((one, controller.first_token(one, prompt, now - amount / 1000, now)))
        elif kind == "lose" and sent:
            controller.ended(sent.pop(0)[0], None, now)
        elif kind == "end" and streams:
            controller.ended(*streams.pop(0), now)
        elif kind == "write":
            for _, stream in streams:
                stream.tokens += 1 + amount % 5
        capacity = controller.capacity(now)
        assert capacity.sequences == 256
        assert capacity.prefill_tokens is None or capacity.prefill_tokens >= 1
        assert capacity.batch_sequences is None or 1 <= capacity.batch_sequences <= 256
        assert capacity.prefill_tokens_per_s is None or 0 < capacity.prefill_tokens_per_s < inf
        assert capacity == controller.capacity(now), "asking changes nothing"
