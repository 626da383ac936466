"""Facts for tests of the rules: a healthy lane and worker, with what a test changes."""

from typing import Any

from inferry.observe.diagnosis.facts import Facts, LaneFacts, WorkerFacts


def a_lane(lane: str = "P1", **changed: Any) -> LaneFacts:
    return LaneFacts(
        **{
            "lane": lane,
            "ttft_ms": 2000.0,
            "itl_ms": 50.0,
            "window": "adaptive",
            "coalesce_ms": 25.0,
            "max_wait_ms": 120.0,
            "max_batch": 64,
            "queue_limit": 10_000,
            "reserve": 0.0,
            "groups": None,
            "calls": 200,
            "calls_per_s": 3.3,
            "depth": 0.0,
            "depth_now": 0,
            "queued_ratio": 0.0,
            "backlogs": 0,
            "running_now": 1,
            "wait_mean_ms": 2.0,
            "wait_p50_ms": 1.0,
            "wait_p95_ms": 5.0,
            "batching_mean_ms": None,
            "ttft_p50_ms": 40.0,
            "ttft_p95_ms": 90.0,
            "itl_p50_ms": 8.0,
            "itl_p95_ms": 12.0,
            "itl_p99_ms": 15.0,
            "attainment": 1.0,
            "measured": 200,
            **changed,
        }
    )


def a_worker(worker: str = "engine", **changed: Any) -> WorkerFacts:
    return WorkerFacts(
        **{
            "worker": worker,
            "kind": "vllm",
            "group": "default",
            "phase": "ready",
            "drained": False,
            "breaker": "closed",
            "opens": 0,
            "up_ratio": 1.0,
            "sequences": 256,
            "prefill_tokens": None,
            "chunk_tokens": 2048,
            "pads": False,
            "kv_packing": "sum",
            "running_now": 3,
            "waiting_now": 0,
            "running": 3.0,
            "waiting": 0.0,
            "queues_at": None,
            "kv_capacity": 100_000,
            "kv_ratio": 0.1,
            "plans": 200,
            "batch": 1.0,
            "utilisation": None,
            "padding_ratio": None,
            "limits": {},
            **changed,
        }
    )


def some_facts(**changed: Any) -> Facts:
    """A minute of healthy traffic on one worker."""
    return Facts(
        **{"window_s": 60.0, "observed_s": 60.0, "lanes": (a_lane(),), "workers": (a_worker(),), **changed},
    )
