"""The cost of the quota gate: microseconds to admit, renew and settle, without limits and with all limits.

All limits: requests, tokens and concurrent calls; run, day and month in tokens and money; of the tenant and of its key;
for a run three levels deep; with watermarks of all of them in a database. The fastest of many short loops is the cost
of the code, the median includes the machine.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.watermarks import WatermarkTracker
from inferry.domain.callers import Caller
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload
from inferry.domain.lanes import Lane
from inferry.domain.prices import Price
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Usage
from inferry.domain.tenants import ApiKey, Limits, Tenant

REPETITIONS = 400
JOBS = 50
MAX_US_UNLIMITED, MAX_US_ADMIT_AND_SETTLE, MAX_US_RENEW = 1.0, 15.0, 2.0

_ALL_LIMITS = Limits(
    requests_per_minute=10**9,
    tokens_per_minute=10**12,
    max_concurrent=10**6,
    run_token_ceiling=10**12,
    run_money_ceiling=1e6,
    day_token_ceiling=10**12,
    day_money_ceiling=1e6,
    month_token_ceiling=10**12,
    month_money_ceiling=1e6,
)
_CALLERS = {
    "no limits": (Limits(), Limits()),
    "a tenant's requests and tokens per minute": (Limits(requests_per_minute=10**9, tokens_per_minute=10**12), None),
    "a ceiling for a run": (Limits(run_token_ceiling=10**12), None),
    "everything on": (_ALL_LIMITS, _ALL_LIMITS),
}
_LINEAGE = ("agent", "group", "root")
_USAGE = Usage(500, 100, 200)
_WALL = 1_773_576_000.0


def measure() -> dict[str, Any]:
    table = {name: _cost(*limits) for name, limits in _CALLERS.items()}
    unlimited, everything = table["no limits"], table["everything on"]
    bounds = {
        "admit_unlimited_us": (unlimited["admit_us"], MAX_US_UNLIMITED),
        "admit_and_settle_us": (everything["admit_us"] + everything["settle_us"], MAX_US_ADMIT_AND_SETTLE),
        "renew_us": (everything["renew_us"], MAX_US_RENEW),
    }
    for name, row in table.items():
        print(f"{name:<42}", *(f"{what[:-3]} {us:6.2f}" for what, us in row.items()), sep="  ")
    within_bounds = {
        name: {"us": round(us, 3), "at_most": bound, "holds": us <= bound} for name, (us, bound) in bounds.items()
    }
    return {"microseconds": table, "bounds": within_bounds}


def _cost(tenant: Limits, key: Limits | None) -> dict[str, float]:
    watermarks = WatermarkTracker()
    gate = QuotaGate({"m": Price(input=0.15, cached_input=0.075, output=0.6)}, watermarks=watermarks)
    api_key = None if key is None else ApiKey(key_id="k", tenant="a", secret_hash=b"", limits=key)
    caller = Caller(Tenant(name="a", limits=tenant), api_key)
    job = _job()
    permits: list[Permit] = []
    gate.settle(gate.admit(job, caller, _LINEAGE, 1.0, _WALL), _USAGE, 1.0, _WALL)
    watermarks.batch_written(watermarks.take_batch(_WALL).number, 1.0)

    def admit() -> None:
        for _ in range(JOBS):
            permits.append(gate.admit(job, caller, _LINEAGE, 1.0, _WALL))

    def renew() -> None:
        for permit in permits:
            gate.renew(permit, 240)

    def settle() -> None:
        for permit in permits:
            gate.settle(permit, _USAGE, 1.0, _WALL)

    samples: dict[str, list[float]] = {"admit": [], "renew": [], "settle": []}
    for _ in range(REPETITIONS):
        samples["admit"].append(_timed(admit))
        samples["renew"].append(_timed(renew))
        samples["settle"].append(_timed(settle))
        permits.clear()
    fastest = {f"{name}_us": round(min(times), 3) for name, times in samples.items()}
    return fastest | {f"{name}_median_us": round(statistics.median(times), 3) for name, times in samples.items()}


def _timed(piece: Callable[[], None]) -> float:
    began = time.perf_counter()
    piece()
    return (time.perf_counter() - began) / JOBS * 1e6


def _job() -> InferenceJob:
    route = RouteKey("m")
    return InferenceJob(
        job_id="j",
        tenant="a",
        run_id="agent",
        step_id="s",
        lane=Lane.P1,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(Estimate.exactly(500), Estimate.exactly(0), Estimate(1, 200, 4_000)),
        token_budget=4_000,
        prompt_hash="",
        arrived_at=0.0,
        max_wait_s=1.0,
        payload=Payload(api="chat", body=b"{}", sampling=Sampling(), output_limit=4_000),
    )


if __name__ == "__main__":
    measure()
