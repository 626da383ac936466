"""GPU time divided from outside: who is charged what, and that charges add up to the engine's busy time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Usage
from inferry.domain.work_prices import prefill_s
from inferry.domain.workers import EngineCounts, Load
from inferry.ledger.attribution import GpuTimeEstimator
from support.builders import a_job

BASE_S, TOKEN_S, PROMPT_S, KV_S = 0.005, 2e-5, 2e-5, 4e-8


class Engine:
    """An engine whose every step is known, seen from outside. `true_s` is what the steps did for each job."""

    def __init__(self, *, counts: bool = True, counted_every: int = 40) -> None:
        self.now = 0.0
        self.estimator = GpuTimeEstimator(0.0)
        self.true_s: dict[Attempt, float] = {}
        self.charged_s: dict[Attempt, float] = {}
        self.open: list[Attempt] = []
        self.decoding: list[Attempt] = []
        self.foreign = 0
        self.foreign_s = 0.0
        self._reports = counts
        self._every = counted_every
        self._counts = [0, 0, 0]

    def send(self, *, tokens: int, cached: int = 0) -> Attempt:
        attempt = Attempt(a_job(tokens=tokens, cached=cached))
        self.true_s[attempt] = 0.0
        self.open.append(attempt)
        self.estimator.sent(attempt, self.now)
        return attempt

    def step(self, count: int = 1) -> None:
        """One token for every job that decodes, and the whole prompt of the first open one."""
        for _ in range(count):
            prompts = self.open[:1]
            sequences = len(prompts) + len(self.decoding) + self.foreign
            if not sequences:
                return
            base_s = BASE_S / sequences
            step_s = self.foreign * (base_s + TOKEN_S)
            self.foreign_s += step_s
            for attempt in prompts:
                tokens = attempt.job.footprint.prefill_tokens
                self.true_s[attempt] += base_s + PROMPT_S * tokens
                step_s += base_s + PROMPT_S * tokens
                self._counts[1] += tokens
            for attempt in self.decoding:
                own_s = base_s + TOKEN_S + KV_S * (attempt.job.footprint.prompt.expected + attempt.output_tokens)
                self.true_s[attempt] += own_s
                step_s += own_s
                attempt.output_tokens += 1
            self.now += step_s
            self._counts[0] += 1
            self._counts[2] += sequences
            for attempt in prompts:
                attempt.output_tokens = 1
                self.open.remove(attempt)
                self.decoding.append(attempt)
                self.estimator.first_token(attempt, self.now)
            if self._counts[0] % self._every == 0:
                self.settle()

    def settle(self) -> None:
        counts = EngineCounts(*self._counts) if self._reports else None
        running = len(self.decoding) + len(self.open) + self.foreign
        self.estimator.settle(self.now, counts, self.now if self._reports else None, Load(running=running))

    def end(self, attempt: Attempt, **usage: Any) -> float:
        for jobs in (self.open, self.decoding):
            if attempt in jobs:
                jobs.remove(attempt)
        share = self.estimator.ended(attempt, Usage(**usage), self.now)
        assert share is not None
        self.charged_s[attempt] = share.seconds
        return share.seconds


def test_a_job_that_is_alone_is_charged_for_all_of_its_time() -> None:
    engine = Engine()
    job = engine.send(tokens=1000)
    engine.step(200)
    assert engine.end(job) == pytest.approx(engine.now)
    assert engine.estimator.busy_s <= engine.now


def test_equal_jobs_are_charged_alike() -> None:
    engine = Engine()
    jobs = [engine.send(tokens=500) for _ in range(4)]
    engine.step(400)
    charges = [engine.end(job) for job in jobs]
    assert charges == pytest.approx([sum(charges) / 4] * 4, rel=0.02)
    assert sum(charges) == pytest.approx(engine.now)


@pytest.mark.parametrize("counts", [True, False])
def test_a_long_context_and_a_long_prompt_are_charged_for_what_they_cost(counts: bool) -> None:
    engine = Engine(counts=counts)
    for _ in range(6):  # what the costs are learned from
        jobs = [engine.send(tokens=tokens) for tokens in (200, 4000, 12_000, 800)]
        engine.step(30)
        jobs += [engine.send(tokens=tokens) for tokens in (3000, 100)]
        engine.step(60)
        for job in jobs[::2]:
            engine.end(job)
        engine.step(60)
        for job in jobs[1::2]:
            engine.end(job)
    last = jobs
    errors = [abs(engine.charged_s[job] / engine.true_s[job] - 1) for job in last]
    assert max(errors) <= 0.1
    assert sum(engine.charged_s.values()) == pytest.approx(engine.now)


def test_a_job_cancelled_before_its_first_token_is_charged_for_its_part_of_the_prompts() -> None:
    engine = Engine()
    first = engine.send(tokens=1000)
    second = engine.send(tokens=1000)
    engine.now += 0.2
    assert engine.end(second) == pytest.approx(0.1)
    assert engine.end(first) == pytest.approx(0.1)


def test_the_reported_usage_corrects_the_estimated_prompt() -> None:
    """The gateway expected 100 tokens to compute; the engine found less in its cache."""
    engine = Engine()
    other, wrong = engine.send(tokens=2000), engine.send(tokens=2000, cached=1900)
    engine.step(100)
    right = engine.end(wrong, prompt_tokens=2000, cached_tokens=16, output_tokens=99)
    assert right > prefill_s(engine.estimator.costs, 1900, 2000)
    engine.end(other)


def test_work_of_other_clients_is_not_charged_to_jobs() -> None:
    engine = Engine()
    engine.foreign = 4
    jobs = [engine.send(tokens=400) for _ in range(4)]
    engine.step(2000)
    for job in jobs:
        engine.end(job)
    engine.settle()
    assert sum(engine.charged_s.values()) == pytest.approx(engine.now / 2, rel=0.1)
    assert engine.estimator.unattributed_s == pytest.approx(engine.foreign_s, rel=0.1)


def test_an_engine_that_only_others_use_is_busy_and_its_time_unattributed() -> None:
    engine = Engine()
    engine.foreign = 3
    for _ in range(10):
        engine.now += 0.5
        engine.settle()
    assert engine.estimator.busy_s == pytest.approx(engine.estimator.unattributed_s)
    assert engine.estimator.busy_s >= 2.5


def test_an_idle_engine_is_not_busy() -> None:
    engine = Engine()
    engine.end(engine.send(tokens=10))
    engine.now += 100.0
    engine.settle()
    assert (engine.estimator.busy_s, engine.estimator.unattributed_s) == (0.0, 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "step", "steps", "end", "settle", "wait"]), st.integers(1, 3000)),
        max_size=120,
    ),
    st.booleans(),
)
def test_charges_and_unattributed_time_add_up_to_the_busy_time(actions: list[tuple[str, int]], counts: bool) -> None:
    engine = Engine(counts=counts, counted_every=7)
    for action, number in actions:
        jobs = [*engine.open, *engine.decoding]
        if action == "send":
            engine.send(tokens=number)
        elif action in ("step", "steps"):
            engine.step(1 if action == "step" else number % 50)
        elif action == "wait":
            engine.now += number / 1000
        elif action == "settle":
            engine.settle()
        elif jobs:
            engine.end(jobs[number % len(jobs)])
    for job in [*engine.open, *engine.decoding]:
        engine.end(job)
    engine.now += 1.0
    engine.settle()
    estimator = engine.estimator
    assert all(charge >= 0 for charge in engine.charged_s.values())
    assert sum(engine.charged_s.values()) + estimator.unattributed_s == pytest.approx(estimator.busy_s, abs=0.02)
