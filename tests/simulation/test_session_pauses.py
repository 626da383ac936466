"""Sessions whose KV does not fit, in the simulator: pauses against the engine alone with sticky routing."""

from collections.abc import Iterator
from itertools import count

import pytest

from inferry.cli.simulate_setup import direct_arms, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.values import replace
from inferry.scheduling.sessions import SessionLimits
from inferry.sim.arrivals import agents
from inferry.sim.calls import Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.simulation import Frontend, Simulation

SESSIONS = 60
SECONDS = 200.0
KV_TOKENS_PER_SESSION = 10_500


def sessions(seed: int) -> Iterator[Run]:
    """Agents with a context of 8,000 tokens that grows to 13,000, in ten calls."""
    for number in count():
        (run,) = agents(
            seed * 1_000 + number, 1, 10, lambda rng: (8_000 if not rng.random() else 500, 60), tool_s=(2.0, 5.0)
        )
        first, *rest = run.steps
        head = (number + 1 << 40, 0, 8_000)
        steps = [replace(step, prompt=(head, *step.prompt)) for step in (first, *rest)]
        yield replace(run, run_id=f"run-{number}", tenant=f"tenant-{number % 4}", steps=tuple(steps))


class TwoTenants:
    """Sessions of two tenants, 54 and 6 at a time: a session is followed by one of the same tenant."""

    def __init__(self, seed: int) -> None:
        self._sessions = {name: self._of_tenant(name, seed + number) for number, name in enumerate(("large", "small"))}
        self._first = ["small" if number % 10 == 9 else "large" for number in range(SESSIONS)]
        self.simulation: Simulation

    def _of_tenant(self, name: str, seed: int) -> Iterator[Run]:
        for number, run in enumerate(sessions(seed)):
            yield replace(run, run_id=f"{name}-{number}", tenant=name)

    def __iter__(self) -> Iterator[Run]:
        return self

    def __next__(self) -> Run:
        tenant = self._first.pop() if self._first else self.simulation.runs[-1].tenant
        return next(self._sessions[tenant])


def an_engine(working_set: float) -> EngineModel:
    """The working set of all sessions is that many times its KV cache."""
    model = load_model()
    kv_tokens = int(SESSIONS * KV_TOKENS_PER_SESSION / working_set)
    return replace(model, flags=replace(model.flags, kv_tokens=kv_tokens))


def play(model: EngineModel, frontend: Frontend) -> Simulation:
    simulation = Simulation(frontend, model.costs, replace(model.flags, policy="fcfs"))
    simulation.play_sessions(sessions(1), SESSIONS, SECONDS, ramp_s=10.0)
    return simulation


def part_of_small_tenant(model: EngineModel, frontend: Frontend, seed: int) -> tuple[float, float]:
    """Its part of the calls that were finished, and of their tokens, after the first 40 s."""
    tenants = TwoTenants(seed)
    tenants.simulation = simulation = Simulation(frontend, model.costs, replace(model.flags, policy="fcfs"))
    simulation.play_sessions(tenants, SESSIONS, SECONDS, ramp_s=10.0)
    done = [row for row in simulation.rows if row.at + row.end_s > 40.0]
    small = [row for row in done if row.tenant == "small"]
    return len(small) / len(done), sum(row.prompt + row.output for row in small) / sum(
        row.prompt + row.output for row in done
    )


def gateway(model: EngineModel, limits: SessionLimits | None) -> Frontend:
    return gateway_arm("gateway", DEFAULT_LANES, simulated_workers(None, model), limits).frontend()


@pytest.mark.parametrize(("working_set", "gain"), [(1.5, 1.4), (2.5, 1.2)])
def test_paused_sessions_finish_sooner_than_sessions_that_evict_each_other(working_set: float, gain: float) -> None:
    model = an_engine(working_set)
    direct = play(model, direct_arms(model, 1)[0].frontend())
    paused = play(model, gateway(model, SessionLimits()))
    assert len(paused.runs) >= gain * len(direct.runs)
    ttfts = [row.ttft_s for row in paused.rows if row.ttft_s is not None] + paused.waits_for_first_token(SECONDS)
    assert max(ttfts) < 60.0


def test_below_saturation_every_decision_is_the_same() -> None:
    model = an_engine(0.5)
    assert play(model, gateway(model, SessionLimits())).rows == play(model, gateway(model, None)).rows


def test_a_closed_loop_has_the_same_number_of_sessions_at_any_time() -> None:
    model = an_engine(0.7)
    simulation = play(model, direct_arms(model, 1)[0].frontend())
    starts = sorted(row.at for row in simulation.runs)
    assert len(simulation.runs) > SESSIONS
    assert starts[SESSIONS] >= min(row.at + row.latency_s for row in simulation.runs)


@pytest.mark.parametrize("working_set", [1.5, 2.5])
def test_a_tenant_with_few_sessions_is_not_paused_for_one_with_many(working_set: float) -> None:
    """With a tenth of the sessions it could use a tenth of the engine, and gets more while all of them slow down."""
    model = an_engine(working_set)
    calls, tokens = part_of_small_tenant(model, gateway(model, SessionLimits()), 1)
    assert min(calls, tokens) > 0.15
    without_pauses, _ = part_of_small_tenant(model, gateway(model, None), 1)
    assert calls > without_pauses
