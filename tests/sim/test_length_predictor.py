"""Output lengths that the simulated gateway expects: told, or predicted by the gateway's own estimator."""

import pytest

from inferry.cli.simulate_setup import gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.prediction.estimator import Estimator
from inferry.sim.calls import MODEL, Call, Run, Step
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import load_model
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.length_predictor import REQUESTED_TOKENS, LengthPredictor, LengthSource
from inferry.sim.simulation import Simulation

COSTS = load_model()


def runs_of(*outputs: int, name: str = "draft", tenant: str = "t") -> list[Run]:
    """One call after another, each of which ends before the next one."""
    return [
        Run(
            run_id=f"{name}-{at}",
            tenant=tenant,
            lane=Lane.P1,
            at=30.0 * at,
            steps=(Step(name, ((at, 0, 500),), output),),
        )
        for at, output in enumerate(outputs)
    ]


def a_call(output: int, name: str = "draft", tenant: str = "t") -> Call:
    (run,) = runs_of(output, name=name, tenant=tenant)
    return Call("call", 1, run, 0, 500, 0.0)


def a_predictor_that_served(*runs: Run) -> LengthPredictor:
    predictor = LengthPredictor()
    Simulation(ControlledFrontend(DEFAULT_LANES, predictor=predictor), COSTS.costs, COSTS.flags).play(runs)
    return predictor


def test_a_prediction_does_not_know_the_output_of_its_call() -> None:
    predictor = LengthPredictor()
    assert predictor(a_call(5)) == predictor(a_call(3_000))
    assert predictor(a_call(5)) == Estimator().output("t", MODEL, 500, REQUESTED_TOKENS, None, None)


def test_it_learns_from_ended_calls_of_the_same_tenant_and_step() -> None:
    predictor = a_predictor_that_served(*runs_of(*[40] * 30), *runs_of(*[900] * 30, name="report"))
    assert predictor.accuracy.jobs == 60
    assert predictor(a_call(1)).expected == pytest.approx(40, rel=0.5)
    assert predictor(a_call(1, name="report")).expected == pytest.approx(900, rel=0.5)
    assert 40 < predictor(a_call(1, name="another")).expected < 900


def test_a_cancelled_call_teaches_nothing() -> None:
    (run,) = runs_of(4_000)
    cancelled = Run(run_id=run.run_id, tenant=run.tenant, lane=run.lane, at=run.at, steps=run.steps, cancel_after_s=1.0)
    assert a_predictor_that_served(cancelled).accuracy.jobs == 0


@pytest.mark.parametrize(("source", "expected"), [("capped", [40, 256]), ("true", [40, 900])])
def test_an_arm_is_told_lengths_or_predicts_them(source: LengthSource, expected: list[int]) -> None:
    workers = simulated_workers(None, COSTS)
    frontend = gateway_arm("told", DEFAULT_LANES, workers, output_source=source).frontend()
    assert isinstance(frontend, GatewayFrontend)
    assert frontend.predictor is None
    assert [frontend._estimate(a_call(tokens)).output.expected for tokens in (40, 900)] == expected
    predicting = gateway_arm("predicting", DEFAULT_LANES, workers, output_source="predicted").frontend()
    assert isinstance(predicting, GatewayFrontend)
    assert predicting.predictor is not None
    assert predicting._estimate(a_call(40)).output == predicting._estimate(a_call(900)).output


def test_what_calls_write_does_not_depend_on_the_prediction() -> None:
    lengths = (5, 40, 700, 5_000)
    frontend = ControlledFrontend(DEFAULT_LANES, predictor=LengthPredictor())
    simulation = Simulation(frontend, COSTS.costs, COSTS.flags)
    simulation.play(runs_of(*lengths))
    assert [(row.outcome, row.produced) for row in simulation.rows] == [("done", length) for length in lengths]


def test_a_call_preempted_with_its_last_token_under_way_is_complete() -> None:
    lanes = DEFAULT_LANES | {Lane.P1: replace(DEFAULT_LANES[Lane.P1], may_preempt=(Lane.P1,), preemptible=True)}
    for quarter_ms in range(4, 160):
        frontend = ControlledFrontend(lanes, predictor=LengthPredictor())
        simulation = Simulation(frontend, COSTS.costs, COSTS.flags)
        simulation.events.at(quarter_ms / 4000, preempt_all, (frontend, simulation))
        simulation.play(runs_of(5))
        (row,) = simulation.rows
        assert (row.outcome, row.produced) == ("done", 5)
        assert row.end_s < 0.25


def preempt_all(now: float, argument: tuple[GatewayFrontend, Simulation]) -> None:
    frontend, simulation = argument
    for call, _ in frontend._open.values():
        call.evicted = True
        simulation.abort(call, now)
