"""The report of `inferry observe` beside a run with Inferry on, on the Azure trace of 2023 (code completions).

Parts of the trace are played directly against the calibrated engine model, and what the proxy would have seen of every
call is recorded as `inferry observe` records it. `inferry observe report` then predicts attainment and GPUs with
Inferry on. The run with Inferry on plays the calls of the trace themselves, through the gateway of `inferry serve` in
the simulator. The two differ in what the report cannot know: it has tokens as reported and times as measured, it plays
a window, and it has no runs. Targets: attainment within 5 points, GPUs needed for 99 % within one.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trace_files import AZURE, trace_file
from benchmarks.wait_arrivals import trace_calls
from inferry.cli.observe import compare
from inferry.cli.simulate_setup import drop_oversized, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.ledger.stores.attempts import AttemptStore
from inferry.observe.observed_call import CallDescriber
from inferry.sim.baselines import Direct
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.report import Report, report
from inferry.sim.simulation import Simulation
from inferry.sim.sizing import smallest_fleet
from inferry.sim.traces import read_trace
from inferry.sim.workload import slo_targets_for

SEEDS = (1, 2, 3)
SPEED = 12.0
"""Times as fast as the trace, so that one GPU is not enough."""
SECONDS = 120.0
GPUS = 2
TARGET = 0.99
MAX_GPUS = 32


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    trace = list(read_trace(trace_file(AZURE)))
    blocks = [compare_once(trace_calls(trace, seed, SPEED, SECONDS), seed) for seed in seeds]
    result = {
        "trace": AZURE,
        "speed": SPEED,
        "seconds": SECONDS,
        "targets": {
            "largest_difference_of_attainment_in_points": {
                "is": max(block["difference_in_points"] for block in blocks),
                "wanted": "<= 5",
            },
            "largest_difference_of_gpus": {
                "is": max(block["difference_in_gpus"] for block in blocks),
                "wanted": "<= 1",
            },
        },
        "blocks": blocks,
    }
    print(json.dumps(result, indent=2), flush=True)
    return result


def compare_once(runs: Sequence[Run], seed: int, gpus: int = GPUS) -> dict[str, Any]:
    """The report about these calls beside the run with Inferry on."""
    model = load_model()
    targets = slo_targets_for(DEFAULT_LANES)
    itl_s = {lane: one.itl_s for lane, one in targets.items()}
    runs = drop_oversized(runs, [gateway_arm("", DEFAULT_LANES, simulated_workers(None, model))])
    fcfs = replace(model.flags, policy="fcfs")
    before = Simulation(Direct(), model.costs, fcfs, workers=gpus, itl_s=itl_s)
    before.play(runs)
    with tempfile.TemporaryDirectory() as directory:
        database = f"sqlite:///{Path(directory) / 'observed.db'}"
        record(before.rows, database)
        found = compare(
            database,
            gpus=gpus,
            target=TARGET,
            calls=len(runs),
            max_gpus=MAX_GPUS,
            slo=[],
            lanes=dict(DEFAULT_LANES),
            price_per_hour=3.0,
        )
    with_inferry = attainment(play_gateway(runs, model, gpus))
    needed = smallest_fleet(lambda count, _: play_gateway(runs, model, count), (0,), TARGET, MAX_GPUS).workers
    after = found.arms[-1].attainment
    assert found.after.gpus is not None
    return {
        "seed": seed,
        "calls": len(runs),
        "gpus": gpus,
        "measured_direct": found.observed_attainment,
        "report": {arm.name: arm.attainment for arm in found.arms},
        "gpu_seconds": {arm.name: round(arm.gpu_seconds, 1) for arm in found.arms},
        "with_inferry": with_inferry,
        "difference_in_points": round(max(abs(after[lane] - with_inferry[lane]) for lane in with_inferry) * 100, 2),
        "gpus_needed": {"before": found.before.gpus, "after": found.after.gpus, "with_inferry": needed},
        "per_month_at_3_an_hour": {"before": found.before.per_month, "after": found.after.per_month},
        "difference_in_gpus": abs(found.after.gpus - needed),
    }


def record(rows: Sequence[CallRow], database: str) -> None:
    """What the proxy would have recorded of calls that went directly to the engines."""
    describer = CallDescriber(b"salt", DEFAULT_LANES)
    store = AttemptStore(database)
    entries = []
    for number, row in enumerate(rows):
        if row.outcome != "done" or row.ttft_s is None or row.late_s is None:
            continue
        headers = {b"x-inferry-lane": row.lane.name.encode(), b"authorization": row.tenant.encode()}
        lane, fields = describer.lane_of(headers, b'{"model":"m"}')
        times = describer.times(lane)
        usage = b'data: {"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (row.prompt, row.output)
        times.arrived(usage, row.at + row.ttft_s)
        times.late_s = row.at + row.late_s
        entries.append(
            describer.entry(
                f"call-{number}",
                headers,
                lane,
                fields,
                times,
                status=200,
                is_aborted=False,
                arrived_at=row.at,
                ended_at=row.at + row.end_s,
                wall=1e9 + row.at + row.end_s,
                body_bytes=4 * row.prompt,
            )
        )
    store.append(entries)
    store.close()


def play_gateway(runs: Sequence[Run], model: EngineModel, gpus: int) -> Report:
    targets = slo_targets_for(DEFAULT_LANES)
    arm = gateway_arm("with Inferry", DEFAULT_LANES, simulated_workers(None, model, gpus))
    itl_s: dict[Lane, float] = {lane: one.itl_s for lane, one in targets.items()}
    simulation = Simulation(arm.frontend(), model.costs, arm.flags, itl_s=itl_s)
    simulation.play(runs)
    return report(simulation, arm.name, {lane: one.ttft_s for lane, one in targets.items()})


def attainment(found: Report) -> dict[str, float]:
    lanes = {name: one.attainment for name, one in found.lanes.items()}
    planned = [one.planned for one in found.lanes.values()]
    return {**lanes, "all": statistics.fmean(list(lanes.values()), weights=planned)}
