"""A version of the settings that is worse on purpose: what `inferry config try` predicts from recorded traffic, what a
trial on the running gateway measures, and how soon the guardrails roll it back.

The gateway has the embedded engine. Calls arrive at random at a fixed rate, each a run of its own. The worse version
holds every call for `HOLD_MS` at most (`window: fixed`). Four parts: traffic with the first version, from which the
prediction is made; a trial without guardrails; the new version for all runs; a trial with guardrails, until it is
rolled back.
"""

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.serving import run_gateway
from inferry.cli.config.loader import parse
from inferry.cli.settings_try import predict
from inferry.cli.settings_wiring import read_recorded
from inferry.domain.traffic import RecordedCall
from inferry.ledger.stores.opening import open_queries
from inferry.sim.report import quantile

CALLS_PER_S = 6.0
PART_S = 90.0
HOLD_MS, TTFT_MS, ITL_MS = 1200, 700, 300
SHARE = 0.5
MODEL = "inferry-triage"
STABLE = {"P1": {"ttft_ms": TTFT_MS, "itl_ms": ITL_MS}}
WORSE = {"P1": {**STABLE["P1"], "window": "fixed", "coalesce_ms": HOLD_MS, "max_wait_ms": HOLD_MS}}
LIMIT_S = 300.0


def measure(part_s: float = PART_S) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        ledger = f"sqlite:///{Path(name) / 'ledger.db'}"
        config = {"lanes": STABLE, "ledger": ledger}
        lax = {"settings": {"min_runs": 1_000_000}}
        with run_gateway({**config, **lax}) as (port, _):
            result, versions = asyncio.run(_measure_size(port, config, part_s))
        result["measured"] = {
            name: _figures(_calls(ledger, *period), version) for name, (version, *period) in versions.items()
        }
        for kind, before in (("trial", "trial_current"), ("whole", "current")):
            predicted, measured = result["predicted"][kind], result["measured"]
            result["errors"] = {
                **result.get("errors", {}),
                kind: _errors(predicted, measured[before], measured["trial_new" if kind == "trial" else "new"]),
            }
        guarded = {**config, "ledger": f"sqlite:///{Path(name) / 'guarded.db'}"}
        with run_gateway(guarded) as (port, _):
            result["rollback"] = asyncio.run(_measure_rollback(port))
    print(json.dumps(result["errors"], indent=1), json.dumps(result["rollback"], indent=1), flush=True)
    return result


async def _measure_size(
    port: int, config: dict[str, Any], part_s: float
) -> tuple[dict[str, Any], dict[str, tuple[int, float, float]]]:
    """Predictions, and when which version was measured."""
    statuses: list[int] = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        await asyncio.gather(*(_call(http, f"warm-{number}") for number in range(10)))
        periods = {"current": (1, *await _traffic(http, part_s, 1, statuses))}
        active, calls = read_recorded(config["ledger"], *periods["current"][1:])
        assert active is not None
        both = parse(config), parse({**config, "lanes": WORSE})
        predicted = {kind: predict(*both, calls, share=share) for kind, share in (("whole", None), ("trial", SHARE))}
        await _post(http, "/admin/settings", {"sections": {"lanes": WORSE}, "share": SHARE})
        trial = await _traffic(http, part_s, 2, statuses)
        compared = await _get(http, "/admin/settings/comparison")
        await _post(http, "/admin/settings", {"version": 2})
        whole = await _traffic(http, part_s, 3, statuses)
    periods |= {"trial_current": (1, *trial), "trial_new": (2, *trial), "new": (2, *whole)}
    result = {
        "calls_per_s": CALLS_PER_S,
        "part_s": part_s,
        "hold_ms": HOLD_MS,
        "ttft_target_ms": TTFT_MS,
        "share": SHARE,
        "calls": len(statuses),
        "failed_calls": sum(status != 200 for status in statuses),
        "predicted": {
            kind: {"current": _as_dict(one.current["P1"]), "new": _as_dict(one.new["P1"])}
            for kind, one in predicted.items()
        },
        "comparison": compared["measures"],
    }
    return result, periods


async def _measure_rollback(port: int) -> dict[str, Any]:
    """A trial with the default guardrails, until it is rolled back."""
    statuses: list[int] = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        await asyncio.gather(*(_call(http, f"warm-{number}") for number in range(10)))
        await _post(http, "/admin/settings", {"sections": {"lanes": WORSE}, "share": SHARE})
        began = time.monotonic()
        ended = asyncio.Event()
        load = asyncio.create_task(_traffic(http, LIMIT_S, 4, statuses, ended))
        while (await _get(http, "/admin/settings"))["candidate"] is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        seconds = time.monotonic() - began
        ended.set()
        await load
        change = (await _get(http, "/admin/settings"))["changes"][0]
    return {
        "seconds": seconds,
        "calls": len(statuses),
        "failed_calls": sum(status != 200 for status in statuses),
        "reason": change["reason"],
    }


async def _traffic(
    http: aiohttp.ClientSession, seconds: float, seed: int, statuses: list[int], ended: asyncio.Event | None = None
) -> tuple[float, float]:
    """Calls at random times, however long each takes; Unix times of the begin and the end."""
    rng, began, tasks = random.Random(seed), time.time(), list[asyncio.Task[int]]()
    at = time.monotonic()
    stop_at = at + seconds
    while at < stop_at and not (ended is not None and ended.is_set()):
        at += rng.expovariate(CALLS_PER_S)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.create_task(_call(http, f"run-{seed}-{len(tasks)}")))
    statuses += await asyncio.gather(*tasks)
    await asyncio.sleep(0.5)  # the ledger's rows are written
    return began, time.time()


async def _call(http: aiohttp.ClientSession, run: str) -> int:
    content = f"Classify this ticket: order {run} was charged twice."
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "stream": True}
    async with http.post("/v1/chat/completions", json=body, headers={"x-inferry-run-id": run}) as response:
        text = await response.text()
        return response.status if "[DONE]" in text else 500


async def _post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()


async def _get(http: aiohttp.ClientSession, path: str) -> Any:
    async with http.get(path) as response:
        return await response.json()


def _calls(ledger: str, since: float, until: float) -> list[tuple[RecordedCall, int | None]]:
    with open_queries(ledger) as queries:
        versions = {one.run_id: one.settings_version for one in queries.jobs(limit=100_000, since=since)}
        return [(call, versions.get(call.run_id)) for call in queries.calls(since, until)]


def _figures(calls: list[tuple[RecordedCall, int | None]], version: int) -> dict[str, Any]:
    """What the ledger says of the calls of one version, as the prediction says it."""
    mine = [call for call, with_version in calls if with_version == version]
    firsts = [call.first_token_ms / 1000 for call in mine if call.first_token_ms is not None]
    tokens = sum(call.output_tokens for call in mine)
    return {
        "calls": len(mine),
        "attainment": sum(call.attained is True for call in mine) / len(mine),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p95": quantile(firsts, 0.95),
        "throughput": tokens / sum(call.total_ms / 1000 for call in mine),
        "cost": 1000 * sum(call.gpu_seconds or 0.0 for call in mine) / tokens,
    }


def _errors(predicted: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """By figure: the predicted and the measured change, and how far the first is from the second, relatively. The
    changes of throughput and cost are relative, as in the comparison of a trial; the others are differences."""
    found = {}
    for name in ("attainment", "ttft_p50", "ttft_p95", "throughput", "cost"):
        expected, measured = predicted["new"][name] - predicted["current"][name], after[name] - before[name]
        if name in ("throughput", "cost"):
            expected, measured = expected / predicted["current"][name], measured / before[name]
        found[name] = {
            "predicted": expected,
            "measured": measured,
            "error": abs(expected - measured) / abs(measured) if measured else None,
            "same_direction": expected * measured > 0,
        }
    return found


def _as_dict(figures: Any) -> dict[str, Any]:
    return {name: getattr(figures, name) for name in figures.__struct_fields__}
