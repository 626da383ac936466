"""Recorded and synthetic traffic on real engines: the gateway against the engine with priorities, call by call.

`python -m benchmarks.gpu_rows play OUT --engine URL --flags NAME --row NAME:SEED ...` plays each row twice on one
engine start, first through a new gateway, then directly with the lane as vLLM's `priority`. Prompts of an arm have
their own salt, so that no arm finds what another one has cached. The workloads are those of
`benchmarks.never_worse`, and so is the rule. With several `--engine` the row is played through the gateway only;
`--kill PID --kill-at S` then kills an engine during it.

`python -m benchmarks.gpu_rows simulate OUT` adds what the simulator says of the same calls. It needs no GPU.
"""

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec import Struct

from benchmarks.never_worse import SLO, Rows, azure_beside_batch, compare, in_lanes, play, trace_at, trace_window
from benchmarks.result_files import circumstances, commit_of
from benchmarks.serving import run_gateway
from benchmarks.trace_files import CODING, MOONCAKE
from inferry.cli.checkout import ROOT, is_compiled
from inferry.cli.simulate_setup import direct_arms, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.loadgen.load_generator import ClientLimits, LoadGenerator
from inferry.loadgen.requests import RequestMaker, RequestMetadata
from inferry.loadgen.rows import CallRow as MeasuredRow
from inferry.loadgen.rows import call_rows
from inferry.loadgen.target import open_target
from inferry.loadgen.traffic import fit_to_context
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.harbor import harbor

ENGINE_FLAGS = {
    "recommended": {"max_num_seqs": 1024, "max_num_batched_tokens": 2048},
    "default": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192},
}
"""What the engines were started with. 1,024 sequences are vLLM's default on an H200."""
CONTEXT_TOKENS = 32_768
MAX_TOOL_S = 2.0
MAX_STEPS = 8
_DIRECT = RequestMetadata(lane_by="priority", tenant_header=None, run_ids=False)


class Kill(Struct, frozen=True):
    """An engine's process, and the second at which it is killed."""

    pid: int
    at_s: float


# -- the engine ------------------------------------------------------------------------------------------------------


class Played(Struct, frozen=True):
    """The calls of one arm, and when the last one ended."""

    rows: Rows
    wall_s: float
    output_tokens: int
    failed: int

    def figures(self) -> dict[str, Any]:
        return {"wall_s": round(self.wall_s, 2), "output_tokens": self.output_tokens, "failed": self.failed}


async def play_on(url: str, runs: Sequence[Run], metadata: RequestMetadata, seed: int) -> Played:
    async with open_target(url, None, None, metadata, "ids") as (client, target):
        requests = RequestMaker(client, target.model, target.form, metadata, uuid4().hex)
        generator = LoadGenerator(client, requests, ClientLimits(), seed)
        await generator.play(list(runs))
    rows = call_rows(generator.calls, generator.began, SLO)
    made = {(seed, row.run, row.step, row.prompt): _as_simulated(row) for row in rows}
    ended = max(row.ended_s for row in rows)
    return Played(made, ended, sum(row.produced for row in rows), sum(row.is_failed for row in rows))


def _as_simulated(row: MeasuredRow) -> CallRow:
    return CallRow(
        run=row.run, step=row.step, tenant=row.tenant, lane=Lane[row.lane], prompt=row.prompt,
        output=row.requested_tokens, at=row.due_s, ttft_s=row.ttft_s, end_s=row.end_s, late_s=row.late_s,
        outcome="done" if row.is_done else "failed" if row.is_failed else "cancelled", produced=row.produced,
    )  # fmt: skip


def play_row(engines: Sequence[str], runs: Sequence[Run], seed: int, kill: Kill | None) -> dict[str, Any]:
    """Both arms, or with several engines the gateway's alone."""
    workers = [{"name": f"gpu-{n}", "kind": "vllm", "url": url} for n, url in enumerate(engines)]

    async def through(port: int) -> Played:
        if kill is not None:
            asyncio.get_running_loop().call_later(kill.at_s, os.kill, kill.pid, signal.SIGKILL)
        return await play_on(f"http://127.0.0.1:{port}", runs, RequestMetadata(), seed)

    with run_gateway({"workers": workers, "ledger": "sqlite:///rows.db"}) as (port, _):
        ours = asyncio.run(through(port))
    if len(engines) > 1:
        return {"lanes": compare(ours.rows, ours.rows), "gateway": ours.figures()}
    theirs = asyncio.run(play_on(engines[0], runs, _DIRECT, seed))
    return _compared(ours, theirs)


def _compared(ours: Played, theirs: Played) -> dict[str, Any]:
    lanes = compare(ours.rows, theirs.rows)
    return {
        "lanes": lanes,
        "kept": all(lane["kept"] for lane in lanes.values()),
        "throughput": round(theirs.wall_s / ours.wall_s * ours.output_tokens / theirs.output_tokens, 3),
        "gateway": ours.figures(),
        "direct": theirs.figures(),
    }


# -- the simulator ---------------------------------------------------------------------------------------------------


def engine_model(flags: str) -> EngineModel:
    model = load_model()
    return replace(model, flags=replace(model.flags, **ENGINE_FLAGS[flags]))


WORKLOADS: dict[str, Callable[[int], list[Run]]] = {
    "harbor": harbor,
    "azure": partial(azure_beside_batch, 2.1),
    "coding": lambda seed: in_lanes(_hurried(trace_window(CODING, 30.0, seed, 199.0)), seed),
    "mooncake": lambda seed: trace_at(MOONCAKE, 20.0, 0.9, load_model(), seed),
}
"""Shorter than in the simulator, so that two arms of a row take a few minutes of a GPU."""


def _hurried(runs: Sequence[Run]) -> list[Run]:
    """The first calls of each session, with tools and people that take at most MAX_TOOL_S."""
    steps = [[replace(step, tool_s=min(step.tool_s, MAX_TOOL_S)) for step in run.steps[:MAX_STEPS]] for run in runs]
    return [replace(run, steps=tuple(made)) for run, made in zip(runs, steps, strict=True)]


def runs_of(name: str, seed: int) -> list[Run]:
    """In the order in which they begin, as the load generator sends them."""
    return sorted(fit_to_context(WORKLOADS[name](seed), CONTEXT_TOKENS)[0], key=lambda run: run.at)


def simulate_row(row: dict[str, Any]) -> dict[str, Any]:
    model, seed = engine_model(row["flags"]), row["seed"]
    runs = runs_of(row["name"], seed)
    # The load generator's calls ignore the end of sequence, so the gateway knows what they write.
    gateway = gateway_arm("gateway", DEFAULT_LANES, simulated_workers(None, model), output_source="true")
    arms = (gateway, direct_arms(model, 1)[1])
    ours, theirs = (_simulated(*play(arm, model, runs, seed)) for arm in arms)
    return _compared(ours, theirs)


def _simulated(rows: Rows, wall_s: float) -> Played:
    outcomes = [row.outcome for row in rows.values()]
    return Played(rows, wall_s, sum(row.produced for row in rows.values()), outcomes.count("failed"))


def errors(measured: dict[str, Any], simulated: dict[str, Any]) -> dict[str, float]:
    """The simulator's value over the measured one, less one."""
    found = {f"{arm} wall_s": (simulated[arm]["wall_s"], measured[arm]["wall_s"]) for arm in ("gateway", "direct")}
    for lane, figures in measured["lanes"].items():
        for key in ("ttft_p95_s", "direct_ttft_p95_s"):
            found[f"{lane} {key}"] = (simulated["lanes"][lane][key], figures[key])
    return {name: round(ours / real - 1, 3) for name, (ours, real) in found.items() if real}


# -- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    out: Path = options.out
    if options.do == "simulate":
        record = json.loads(out.read_text()) | {"simulated_at_commit": commit_of(ROOT)}
        for row in record["rows"]:
            if "direct" in row:
                row["simulated"] = simulate_row(row)
                row["simulator_error"] = errors(row, row["simulated"])
        out.write_text(json.dumps(record, indent=1) + "\n")
        return
    kill = None if options.kill is None else Kill(options.kill, options.kill_at)
    record = json.loads(out.read_text()) if out.exists() else {"rows": [], "commit": commit_of(ROOT), **circumstances()}
    for name, _, seed in (one.rpartition(":") for one in options.row):
        figures = play_row(options.engine, runs_of(name, int(seed)), int(seed), kill)
        row = {"name": name, "seed": int(seed), "flags": options.flags, "engines": len(options.engine)}
        record["rows"].append({**row, "compiled": is_compiled(), **figures})
        out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["rows"][-1]), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_rows", description=__doc__)
    parser.add_argument("do", choices=("play", "simulate"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--flags", choices=tuple(ENGINE_FLAGS), default="recommended")
    parser.add_argument("--row", action="append", default=[])
    parser.add_argument("--kill", type=int)
    parser.add_argument("--kill-at", type=float, default=20.0)
    return parser


if __name__ == "__main__":
    main()
