"""Jobs, workers and lane policies for the scheduler's state machine."""

from typing import Any

from hypothesis import strategies as st

from inferry.domain.lanes import Lane
from inferry.domain.workers import Load, Phase
from support.builders import a_policy

WORKERS = ("u", "v", "w")

sizes = st.sampled_from([1, 40, 100, 600, 2_000, 5_000])
limits = st.sampled_from([None, None, None, None, 0, 1, 2, 5])
token_limits = st.sampled_from([None, None, None, None, 0, 100, 700, 3_000])
policies = st.builds(
    a_policy,
    window=st.sampled_from(["off", "fixed", "adaptive"]),
    coalesce_ms=st.sampled_from([0, 8, 64, 64]),
    max_wait_ms=st.sampled_from([4, 60_000, 60_000]),
    max_batch=st.sampled_from([1, 2, 64, 64]),
    queue_limit=st.sampled_from([3, 1_000, 1_000]),
)
reserves = st.sampled_from([(0.0, 0.0, 0.0), (0.0, 0.0, 0.25), (0.0, 0.1, 0.5)])
shares = st.sampled_from([(0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.3), (0.0, 0.4, 0.4)])
# What all lanes, jobs and workers of a machine have in common: pure fleets reach deeper than mixed ones.
ONE_KIND_OF_JOB = {"model": "m", "adapter": None, "isolation": None}
ONE_KIND_OF_WORKER = {"models": ("m",), "isolation": None, "foreign": None}
UP = ONE_KIND_OF_WORKER | {"phase": Phase.READY}
PATIENT = ONE_KIND_OF_JOB | {"max_wait_s": 60.0}
HOLDING = {"window": "adaptive", "coalesce_ms": 64, "max_wait_ms": 60_000}
OFF = {"window": "off", "queue_limit": 1_000}
Theme = tuple[dict[Lane, dict[str, Any]], dict[str, Any], dict[str, Any]]
jobs = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(list(Lane)),
        "tokens": sizes,
        "output": st.sampled_from([1, 50]),
        "model": st.sampled_from(["m", "m", "m", "m", "n"]),
        "adapter": st.sampled_from([None, None, None, None, "x"]),
        "isolation": st.sampled_from([None, None, None, None, None, "acme"]),
        "group": st.sampled_from([None, None, "other"]),
        "max_wait_s": st.sampled_from([60.0, 60.0, 60.0, 0.0, 0.003]),
    }
)
views = st.fixed_dictionaries(
    {
        "worker": st.sampled_from(WORKERS),
        "models": st.sampled_from([("m",), ("m",), ("m", "n"), ("m", "n"), ("n",)]),
        "adapters": st.sampled_from([(), ("x",)]),
        "isolation": st.sampled_from([None, None, None, None, None, "acme"]),
        "phase": st.sampled_from([Phase.READY] * 5 + [Phase.DRAINING]),
        "pads": st.booleans(),
        "sequences": limits,
        "kv_tokens": token_limits,
        "prefill_tokens": token_limits,
        "foreign": st.sampled_from([None, None, None, None, Load(running=1, kv_tokens=50)]),
    }
)
