"""Room is computed from what was measured and promised; feedback only trims it."""

from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.bench.controller import engines, load_steps
from inferry.domain.jobs import DEFAULT_LANES, Lane
from inferry.domain.plans import Load, Room
from inferry.scheduling.controller import BEAT_S, COLD_PREFILL_TOKENS, LEAST_TRIM, QUIET_S, RoomController
from inferry.scheduling.rates import StepCosts

LIMITS = Room(sequences=256, kv_tokens=400_000)
CHUNK = 2048


class Script:
    """An engine that takes exactly so long, as the gateway sees it."""

    def __init__(self, *, base_s: float = 0.005, token_s: float = 0.0001, prompt_s: float = 25e-6) -> None:
        self.controller = RoomController(DEFAULT_LANES, LIMITS, CHUNK)
        self.base_s, self.token_s, self.prompt_s = base_s, token_s, prompt_s
        self.now = 0.0
        self.decoding = dict.fromkeys(Lane, 0)
        self.rooms: list[Room] = []

    def begin(self, lane: Lane, prompt: int = 1000) -> None:
        """A job that nothing is ahead of."""
        self.controller.sent(prompt, lane, self.now)
        sent_at = self.now
        self.now += prompt * self.prompt_s + self.base_s
        self.controller.first_token(lane, prompt, sent_at, self.now)
        self.decoding[lane] += 1

    def end(self, lane: Lane) -> None:
        self.controller.ended(lane, self.now)
        self.decoding[lane] -= 1

    def beats(self, count: int, *, prompts: int = 0, size: int = 1000, lane: Lane = Lane.P1, slow: float = 1.0) -> None:
        """Time passes: everything decodes, and in every beat so many prompts come, are computed and end."""
        for _ in range(count):
            sequences = sum(self.decoding.values())
            for _ in range(prompts):
                self.controller.sent(size, lane, self.now)
            prompt_s = prompts * size * self.prompt_s
            steps = (BEAT_S - prompt_s) / (self.base_s + self.token_s * sequences)
            gap_s = BEAT_S / steps * slow
            self.now += BEAT_S
            for decoding_lane, decoding in self.decoding.items():
                self.controller.gaps(decoding_lane, round(steps * decoding), round(steps * decoding) * gap_s)
            for _ in range(prompts):
                self.controller.first_token(lane, size, self.now - BEAT_S, self.now)
                self.controller.ended(lane, self.now)
            self.rooms.append(self.controller.room(self.now))

    @property
    def room(self) -> Room:
        return self.controller.room(self.now)


def a_busy(**costs: float) -> Script:
    """Two live sequences and six of a batch; prompts vary over seconds, so that costs can be told apart."""
    script = Script(**costs)
    for lane in (Lane.P0, Lane.P1, *[Lane.P2] * 6):
        script.begin(lane)
    for prompts in (1, 3, 0, 2) * 4:
        script.beats(10, prompts=prompts)
    return script


def rate_of(room: Room) -> float:
    assert room.prefill_tokens_per_s is not None
    return room.prefill_tokens_per_s


def bound_of(room: Room) -> int:
    assert room.prefill_tokens is not None
    return room.prefill_tokens


def test_before_anything_was_measured_room_is_what_the_worker_can_hold_and_a_few_prompts() -> None:
    room = RoomController(DEFAULT_LANES, LIMITS, CHUNK).room(0.0)
    assert room.sequences == LIMITS.sequences
    assert room.prefill_tokens == COLD_PREFILL_TOKENS
    assert room.prefill_tokens_per_s is None


def test_costs_are_learned_from_what_can_be_seen_from_outside() -> None:
    costs = a_busy().controller.costs
    assert costs.prompt_s == pytest.approx(25e-6, rel=0.25)
    assert costs.step_s(8) == pytest.approx(0.0058, rel=0.25)


def test_a_slower_engine_has_less_room() -> None:
    fast = a_busy().room
    slow = a_busy(prompt_s=50e-6).room
    assert rate_of(slow) < rate_of(fast)
    assert bound_of(slow) < bound_of(fast)
    heavy = a_busy(token_s=0.001).room
    assert rate_of(heavy) < rate_of(fast)
    assert heavy.sequences is not None
    assert fast.sequences is not None
    assert heavy.sequences < fast.sequences


def test_room_is_never_less_than_a_typical_job() -> None:
    script = a_busy(prompt_s=150e-6)
    script.beats(30, slow=20.0)
    assert script.controller.trim == LEAST_TRIM
    assert bound_of(script.room) >= 999
    assert rate_of(script.room) > 0


def test_gaps_beyond_the_promise_close_it_within_a_few_beats_and_calm_opens_it_slowly() -> None:
    script = a_busy()
    before = rate_of(script.room)
    script.beats(5, slow=10.0)
    assert script.controller.trim < 0.6
    assert rate_of(script.room) < 0.85 * before
    closed = script.controller.trim
    script.beats(40)
    assert closed < script.controller.trim
    script.beats(60)
    assert script.controller.trim == 1.0


def test_a_live_first_token_that_took_most_of_its_promise_closes_it() -> None:
    script = a_busy()
    script.controller.sent(200, Lane.P0, script.now)
    script.controller.first_token(Lane.P0, 200, script.now - 0.45, script.now)
    script.beats(1)
    assert script.controller.trim < 1.0


def test_it_opens_when_live_lanes_are_quiet_and_closes_at_once_when_one_speaks() -> None:
    script = a_busy()
    busy = script.room
    script.end(Lane.P0)
    script.end(Lane.P1)
    script.beats(int(QUIET_S / BEAT_S) + 1)
    quiet = script.room
    assert quiet.prefill_tokens_per_s is None
    assert bound_of(quiet) > 2 * bound_of(busy)
    script.controller.sent(500, Lane.P0, script.now)
    assert rate_of(script.room) > 0
    assert bound_of(script.room) < bound_of(quiet)


def test_it_does_not_oscillate_under_constant_load() -> None:
    script = a_busy()
    script.beats(50, prompts=2)
    script.rooms.clear()
    script.beats(100, prompts=2)
    rates = [rate_of(room) for room in script.rooms]
    assert max(rates) <= 1.2 * min(rates)
    bounds = [bound_of(room) for room in script.rooms]
    assert max(bounds) <= 1.2 * min(bounds)


def test_the_same_inputs_give_the_same_rooms() -> None:
    first, second = a_busy(), a_busy()
    assert first.rooms == second.rooms


def test_work_of_others_counts_as_sequences_that_decode() -> None:
    script = a_busy(token_s=0.0005)
    alone = rate_of(script.room)
    script.controller.observe(Load(running=28))
    assert rate_of(script.room) < alone


def test_time_that_stands_still_or_goes_back_changes_nothing() -> None:
    script = a_busy()
    room = script.room
    assert script.controller.room(script.now - 5) == room
    assert script.controller.room(script.now) == room


def test_lanes_without_promises_leave_the_worker_open() -> None:
    controller = RoomController({Lane.P2: DEFAULT_LANES[Lane.P2]}, LIMITS)
    controller.sent(1000, Lane.P2, 0.0)
    controller.first_token(Lane.P2, 1000, 0.0, 0.5)
    controller.gaps(Lane.P2, 10, 0.1)
    room = controller.room(1.0)
    assert (room.sequences, room.prefill_tokens, room.prefill_tokens_per_s) == (256, None, None)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["sent", "first", "gaps", "ended"]),
        st.sampled_from(Lane),
        st.integers(1, 200_000),
        st.floats(0, 50, allow_nan=False),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_room_is_finite_positive_and_within_the_limits_whatever_is_seen(
    events: list[tuple[str, Lane, int, float]],
) -> None:
    controller = RoomController(DEFAULT_LANES, LIMITS, CHUNK)
    now = 0.0
    prefilling: dict[Lane, list[tuple[int, float]]] = {lane: [] for lane in Lane}
    decoding = dict.fromkeys(Lane, 0)
    for kind, lane, tokens, seconds in events:
        now += seconds
        if kind == "sent":
            controller.sent(tokens, lane, now)
            prefilling[lane].append((tokens, now))
        elif kind == "first" and prefilling[lane]:
            controller.first_token(lane, *prefilling[lane].pop(), now)
            decoding[lane] += 1
        elif kind == "gaps":
            controller.gaps(lane, tokens, tokens * seconds)
        elif kind == "ended" and decoding[lane]:
            controller.ended(lane, now)
            decoding[lane] -= 1
        room = controller.room(now)
        assert room.sequences is not None
        assert 1 <= room.sequences <= 256
        assert room.kv_tokens is not None
        assert 1 <= room.kv_tokens <= 400_000
        assert room.prefill_tokens is not None
        assert room.prefill_tokens >= 1
        rate = room.prefill_tokens_per_s
        assert rate is None or (isfinite(rate) and rate > 0)


@given(st.lists(st.tuples(*[st.floats(0, 1e5, allow_nan=False)] * 5), max_size=40))
def test_costs_are_finite_and_never_negative(sums: list[tuple[float, float, float, float, float]]) -> None:
    costs = StepCosts()
    for one in sums:
        costs.add(*one)
        assert all(isfinite(cost) and cost >= 0 for cost in (costs.base_s, costs.token_s, costs.prompt_s))


@pytest.mark.parametrize("engine", ["gpu", "cpu"])
def test_p0_keeps_its_promise_through_steps_of_load_in_the_twin(engine: str) -> None:
    steps = load_steps(*engines()[engine], seeds=[1])
    assert len(steps) == 3
    for step in steps.values():
        assert step["attainment"] >= 0.97
