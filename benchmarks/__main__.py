"""`python -m benchmarks [NAME …]`: run benchmarks and write their results to benchmarks/results/."""

import importlib
import sys

from benchmarks.result_files import save

BENCHES = {
    "ablation": "which tuning constants of the scheduler pay: each removed, halved and doubled, in the simulator",
    "admission": "the quota gate: microseconds to admit, renew and settle, without limits and with all of them",
    "attack": "clients without a key that flood the HTTP server: latency of `/health` and memory",
    "attainment_bound": "the most targets that any schedule could meet on recorded traffic, and those met, simulated",
    "attribution": "GPU-seconds of jobs estimated from outside against the true division of every step, simulated",
    "batched": "`@inferry.batched`: microseconds per item beyond a call of the function with the whole list",
    "batches": "a batch of 50,000 requests: memory, time, live calls beside it, time until a cancel has effect",
    "bound": "the fewest misses that any schedule can have: lower bounds for the Harbor burst in the simulator",
    "cascade": "a cascade with known answers: share of the small model, agreement against its promise, cost",
    "scheduler": "the scheduler: microseconds per job, tick time with a blocked backlog",
    "embeddings": "500 concurrent embeddings against one by one, with and without batching windows",
    "engine": "the embedded engine: batched against one by one, one call against transformers",
    "durable_jobs": "async jobs through Redis Streams with an engine that answers at once: rate, memory, cost of a job",
    "fairness": "shares of tenants and bounds of lanes under overload, in virtual time",
    "controller": "the capacity controller in the simulator: steps of load on three engines",
    "kv_allocation": "where KV blocks lie: decode steps that could read one range, and blocks copied, by allocation",
    "lanes": "time to first token of live calls: idle gateway, batch backlog, and with lanes off",
    "lost_engine": "Harbor on two and on four engines of which one is lost: attainment, misses, ten seeds, simulated",
    "modes": "static, dynamic, continuous and hybrid batching of the embedded engine on one workload",
    "never_worse": "the gateway against the engine alone with priorities, by lane: ten seeds, three loads, simulated",
    "observe_overhead": "what `inferry observe` adds to a call: milliseconds at the median",
    "observe_report": "the report of `inferry observe` beside a run with Inferry on, on the Azure trace, simulated",
    "overflow": "a burst at three times the capacity with overflow to a hosted API: deadlines and cost, simulated",
    "overload": "30 s at three times the capacity, with the retries of the official client, against bare 429s",
    "messages": "an event of the Messages API beside one of chat completions: microseconds, without sockets",
    "own_lane": "jobs that yield to short ones of their own lane: time of short and long calls, simulated",
    "path": "the cost of a call: the gateway beside a bare pass-through and other gateways, with a profile",
    "pipeline": "200 concurrent retrieval pipelines against clients that call each stage, and the time of a cancel",
    "processes": "requests per second and streams of 1 to 8 gateway processes on one port, and the latency of the hop",
    "prompt_targets": "prompts of recorded traffic that miss a TTFT target even alone, by `ttft_ms_per_1k_tokens`",
    "recorder": "3,000 attempts/s into the recorder beside 300 live calls/s, with SQLite and with PostgreSQL",
    "runs": "time until the cancellation of a run with 1,000 queued steps is confirmed by the embedded engine",
    "scale": "the simulator itself: up to two million jobs over a thousand workers, time and memory",
    "settings_ab": "settings tried in the simulator and on a gateway: predicted and measured, time until a rollback",
    "sessions": "sessions whose KV does not fit, with pauses, against sticky routing: finished per minute, simulated",
    "streams": "5,000 open streams: memory of each, and the effect of one slow reader on the others",
    "simulator": "the simulator against recorded runs, then the Harbor burst in it, ten seeds and eight arms",
    "triage": "the bundled model: accuracy on held-out tickets, and its answers to unscripted ones",
    "waits": "predicted waits against the real scheduler in the simulator: how often a stated P90 holds",
    "windows": "batching windows: adaptive against off and fixed, before engines that batch or pad",
}


def main(given: list[str]) -> int:
    """Run the benchmarks of these names, or all. A name may be that of the results: `settings-ab`."""
    names = [name.replace("-", "_") for name in given]
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(
            f"unknown benchmark {', '.join(unknown)}; there are:",
            *(f"  {n}: {w}" for n, w in BENCHES.items()),
            sep="\n",
        )
        return 2
    for name in names or BENCHES:
        print(f"== {name}: {BENCHES[name]}", flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"written to {save(name, module.measure())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
