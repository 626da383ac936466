"""`python -m benchmarks [NAME …]`: run the measurements and keep their results under benchmarks/results/."""

import importlib
import sys

from benchmarks.result_files import save

BENCHES = {
    "ablation": "which tuning constants of the scheduler pay: each removed, halved and doubled, in the simulator",
    "admission": "the gate: microseconds to admit, renew and settle, without limits and with all of them on",
    "attack": "clients without a key that flood the HTTP server: what `/health` and its memory see of them",
    "bound": "what no schedule can beat that keeps its promises: lower bounds for the Harbor burst in the simulator",
    "scheduler": "the scheduler core: microseconds a job, tick time with a blocked backlog",
    "engine": "the embedded engine: batched against one by one, one call against transformers",
    "fairness": "shares of tenants and bounds of lanes under overload, in virtual time",
    "controller": "the room controller in the simulator: steps of load on three engines",
    "lanes": "first-token time of live calls on an idle gateway, under a batch backlog, and with lanes off",
    "overload": "thirty seconds of three times the capacity, with the official client's own retries, against bare 429s",
    "path": "the cost of the path: the gateway beside a bare pass-through and other gateways, with a profile",
    "runs": "how long a run of a thousand queued steps lives after its cancel, confirmed at the embedded engine",
    "scale": "the simulator itself: up to a million jobs over two hundred workers, time and memory",
    "streams": "five thousand open streams: memory of each, and what one slow reader does to the rest",
    "simulator": "the simulator against recorded runs, then the Harbor burst in it, ten seeds and six arms",
    "waits": "predicted waits against the real scheduler in the simulator: how often a stated P90 holds",
    "windows": "holding jobs for company: adaptive against off and fixed, before engines that batch or pad",
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"unknown bench {', '.join(unknown)}; there are:", *(f"  {n}: {w}" for n, w in BENCHES.items()), sep="\n")
        return 2
    for name in names or BENCHES:
        print(f"== {name}: {BENCHES[name]}", flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"kept in {save(name, module.measure())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
