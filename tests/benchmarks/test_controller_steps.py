"""The controller benchmark: its load, and its detection of the settled state."""

from benchmarks.controller import (
    SETTLED,
    STEPS,
    Oracle,
    _backlog_end,
    _drain_s,
    _play,
    _scaled_slo,
    _settling,
    _steady_time,
    _stepped,
    engines,
    full_load,
    load_steps,
)
from inferry.domain.workers import Capacity
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import load_model
from inferry.sim.simulation import Simulation

COSTS = load_model().costs


def test_no_two_calls_of_the_load_begin_alike() -> None:
    runs = list(_stepped(COSTS, 1.0, 1))
    assert len({run.steps[0].prompt[0][0] for run in runs}) == len(runs)


def test_one_and_a_half_of_what_an_engine_can_do_leaves_a_backlog_that_is_served_afterwards() -> None:
    cells = load_steps(*engines()["gpu"], seeds=range(1))
    _, high, after = cells.values()
    assert high["backlog_gone_s"] is None, "it only grows"
    assert 5 < after["backlog_gone_s"] < 35
    assert after["after_backlog"]["gone_s"] <= after["backlog_gone_s"]
    assert high["after_backlog"] is None
    assert min(cell["attainment"] for cell in cells.values()) > 0.95


def test_rest_begins_after_the_last_second_that_is_off_by_more_than_chance() -> None:
    rest = (1.0, 0.0)
    off, noisy = (1.0 + 2 * SETTLED, 0.0), (1.0 + 2 * SETTLED, 3 * SETTLED)
    assert _settling([rest, off, rest, rest], [rest] * 4) == 2.0
    assert _settling([rest, noisy, rest, rest], [rest] * 4) == 0.0


def test_the_oracle_has_from_the_beginning_what_was_granted_in_the_end() -> None:
    length_s = STEPS[0][1]
    assert length_s - 10 <= _steady_time(0.3) < length_s
    assert _steady_time(length_s - 2) == length_s - 2
    granted = [(0.0, 0, 0.0, Capacity(1)), (length_s - 10, 0, 0.0, Capacity(2)), (length_s, 0, 0.0, Capacity(3))]
    oracle = Oracle(_scaled_slo(1.0), granted)
    simulation = Simulation(oracle, COSTS, load_model().flags)
    assert oracle._compute_capacity(0, simulation.engines[0], 1.0) == Capacity(2)
    assert oracle._compute_capacity(0, simulation.engines[0], length_s + 35.0) == Capacity(3)


def test_an_oracle_that_takes_over_later_finds_the_engine_as_the_controller_left_it() -> None:
    lanes, since, wide = _scaled_slo(1.0), 22.0, Capacity(sequences=256)
    runs = [run for run in _stepped(COSTS, full_load(COSTS), 1) if run.at < 30]
    ours = _play([runs], lanes, COSTS, [ControlledFrontend(lanes)])
    after = _play([runs], lanes, COSTS, [Oracle(lanes, [(0.0, 0, 0.0, wide)], since)])
    ended_before = [[row for row in one.rows[0] if row.at + row.end_s < since] for one in (ours, after)]
    assert len(ended_before[0]) > 20
    assert ended_before[0] == ended_before[1]
    assert ours.rows != after.rows, "from then on it is another"


def test_a_backlog_ends_when_its_last_job_is_sent() -> None:
    queue = [(1.0, 12.0), (11.0, 15.0), (14.0, 14.0), (16.0, 18.0)]
    assert _backlog_end(queue, 10.0) == 15.0
    assert _backlog_end(queue, 15.5) == 15.5


def test_an_engine_is_empty_of_what_was_sent_by_then_and_not_of_what_came_later() -> None:
    lanes = _scaled_slo(1.0)
    runs = [run for run in _stepped(COSTS, 1.0, 1) if run.at < 20]
    [rows] = _play([runs], lanes, COSTS, [ControlledFrontend(lanes)]).rows
    before = [row for row in rows if row.sent_s is not None and row.at + row.sent_s <= 10.0]
    assert _drain_s(rows, 10.0) == _drain_s(before, 10.0) < max(row.at + row.end_s for row in rows) - 10.0


def test_what_an_engine_can_do_is_more_than_one_small_batch_after_the_other() -> None:
    assert 1.0 < full_load(COSTS) < 3.0
