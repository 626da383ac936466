"""Sessions whose KV does not fit, on a real engine: finished sessions per minute through the gateway and directly.

`python -m benchmarks.gpu_sessions OUT --engine URL --kv-tokens N --row TRACE:WORKING_SET:SEED ...` plays each row on
one engine start, first directly and then through a new gateway. The engine was started with a KV cache of N tokens
(vLLM's `--num-gpu-blocks-override`). As many sessions run at a time as make their working set WORKING_SET times that
size; the next one begins when one has ended. With one engine, sticky routing sends every call there at once.

Sessions, their tool times and what counts are those of `benchmarks.sessions`, over a shorter time. Prompts of an arm
have their own salt, so that no arm finds what another one has cached.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

from benchmarks.gpu_rows import CONTEXT_TOKENS
from benchmarks.result_files import circumstances, commit_of
from benchmarks.serving import run_gateway
from benchmarks.sessions import LATE_S, in_order, mean_kv_tokens, repeated
from benchmarks.trace_files import AGENTS, CODING, trace_file
from inferry.cli.checkout import ROOT, is_compiled
from inferry.domain.values import replace
from inferry.loadgen.load_generator import Call, ClientLimits, LoadGenerator, RunRecord
from inferry.loadgen.requests import RequestMaker, RequestMetadata
from inferry.loadgen.target import open_target
from inferry.loadgen.traffic import fit_to_context
from inferry.sim.calls import Run
from inferry.sim.report import quantile
from inferry.sim.traces import read_trace

TRACES = {"coding": CODING, "agents": AGENTS}
RAMP_S = 20.0
CALL_TIMEOUT_S = 300.0
_DIRECT = RequestMetadata(lane_by="none", tenant_header=None, run_ids=False)


class Sessions:
    """Sessions in turn, each beginning when it is taken; the first ones are spread over RAMP_S."""

    def __init__(self, runs: Sequence[Run], at_a_time: int) -> None:
        self._runs = repeated(runs)
        self._at_a_time = at_a_time
        self._taken = 0
        self._began = perf_counter()

    def __iter__(self) -> Iterator[Run]:
        return self

    def __next__(self) -> Run:
        ramp_s = RAMP_S * self._taken / self._at_a_time if self._taken < self._at_a_time else 0.0
        self._taken += 1
        return replace(next(self._runs), at=max(ramp_s, perf_counter() - self._began))


async def play_on(
    url: str, runs: Sequence[Run], metadata: RequestMetadata, at_a_time: int, warm_up_s: float, seconds: float
) -> dict[str, float]:
    async with open_target(url, None, None, metadata, "ids") as (client, target):
        requests = RequestMaker(client, target.model, target.form, metadata, uuid4().hex)
        generator = LoadGenerator(client, requests, ClientLimits(call_timeout_s=CALL_TIMEOUT_S))
        asyncio.get_running_loop().call_later(seconds, generator.stop)
        await generator.play_closed(Sessions(runs, at_a_time), at_a_time)
    return figures(generator.calls, generator.run_records, generator.began + warm_up_s, generator.began + seconds)


def figures(calls: Sequence[Call], sessions: Sequence[RunRecord], begun: float, ended: float) -> dict[str, float]:
    """Of the calls that were due and the sessions that ended between two times."""
    done = [call for call in calls if begun <= call.due and call.outcome == "done" and call.times]
    finished = [one for one in sessions if one.ok and begun <= one.ended <= ended]
    ttfts_s = [call.times[0] - call.due for call in done]
    # What has waited for long at the end counts with what it had waited.
    waiting = [ended - call.due for call in calls if not call.times]
    ttfts_s += [waited_s for waited_s in waiting if waited_s > LATE_S]
    minutes = (ended - begun) / 60
    return {
        "sessions_per_minute": round(len(finished) / minutes, 3),
        "calls_per_second": round(len(done) / minutes / 60, 3),
        "cached": round(_cached(done), 4),
        "ttft_p50_s": round(quantile(ttfts_s, 0.5) or 0.0, 3),
        "ttft_p99_s": round(quantile(ttfts_s, 0.99) or 0.0, 3),
        "ttft_max_s": round(max(ttfts_s, default=0.0), 3),
        "slowest_session_s": round(max((one.ended - one.began for one in finished), default=0.0), 1),
        "failed": sum(call.outcome not in ("done", "cancelled") for call in calls),
    }


def _cached(calls: Sequence[Call]) -> float:
    """The share of prompt tokens that the engine reports as cached."""
    return sum(call.cached or 0 for call in calls) / max(1, sum(call.prompt for call in calls))


def play_row(url: str, row: str, kv_tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
    name, working_set, seed = row.split(":")
    runs = in_order(fit_to_context(read_trace(trace_file(TRACES[name])), CONTEXT_TOKENS)[0], int(seed))
    at_a_time = round(float(working_set) * kv_tokens / mean_kv_tokens(runs))
    direct = asyncio.run(play_on(url, runs, _DIRECT, at_a_time, warm_up_s, seconds))
    workers = [{"name": "gpu", "kind": "vllm", "url": url}]
    with run_gateway({"workers": workers, "ledger": "sqlite:///sessions.db"}) as (port, _):
        through = play_on(f"http://127.0.0.1:{port}", runs, RequestMetadata(), at_a_time, warm_up_s, seconds)
        gateway = asyncio.run(through)
    ratio = gateway["sessions_per_minute"] / max(direct["sessions_per_minute"], 1e-9)
    return {
        "trace": name,
        "working_set": float(working_set),
        "seed": int(seed),
        "sessions_at_a_time": at_a_time,
        "kv_tokens": kv_tokens,
        "warm_up_s": warm_up_s,
        "seconds": seconds,
        "compiled": is_compiled(),
        "ratio": round(ratio, 3),
        "calls_ratio": round(gateway["calls_per_second"] / direct["calls_per_second"], 3),
        "direct": direct,
        "gateway": gateway,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_sessions", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--kv-tokens", type=int, required=True)
    parser.add_argument("--row", action="append", default=[])
    parser.add_argument("--warm-up", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=240.0)
    options = parser.parse_args()
    out: Path = options.out
    record = json.loads(out.read_text()) if out.exists() else {"rows": [], "commit": commit_of(ROOT), **circumstances()}
    for row in options.row:
        record["rows"].append(play_row(options.engine, row, options.kv_tokens, options.warm_up, options.seconds))
        out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["rows"][-1]), flush=True)


if __name__ == "__main__":
    main()
