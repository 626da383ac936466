"""`inferry observe report` about recorded calls whose figures can be worked out by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from inferry.cli.main import app
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.observed import SLICE_BYTES, UPSTREAM, Observed, ObservedFields
from inferry.ledger.stores.attempts import AttemptStore
from inferry.sim.costs import CostModel, EngineFlags, EngineModel

BEGIN = 1_000_000.0


def a_call(number: int, *, at: float = 0.0, lane: str = "P1", prompt: int = 16, **fields: Any) -> LedgerEntry:
    values: dict[str, Any] = {"worker": UPSTREAM, "outcome": Outcome.DONE, "attained": True, **fields}
    observed = ObservedFields(status=200, prompt_bytes=4 * prompt)
    return LedgerEntry(
        **{"decision": msgspec.json.encode(Observed(observed)), "output_tokens": 5, "total_ms": 700.0, **values},
        job_id=f"j{number}",
        attempt=1,
        tenant="t",
        run_id=f"r{number}",
        step_id="s",
        model="m",
        lane=lane,
        ended_at=BEGIN + at + values.get("total_ms", 700.0) / 1000,
        prompt_tokens=prompt,
        queue_ms=0.0,
        first_token_ms=100.0,
    )


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The report about some rows, on an engine that serves one call at a time with 0.1 s per token."""

    def make(entries: list[LedgerEntry], *arguments: str, prefill_token_s: float = 0.0) -> dict[str, Any]:
        database, model_file = f"sqlite:///{tmp_path / 'observed.db'}", tmp_path / "model.json"
        store = AttemptStore(database)
        store.append(entries)
        store.close()
        costs = CostModel(base_s=0.1, prefill_token_s=prefill_token_s, sequence_s=0.0, kv_token_s=0.0)
        model = EngineModel(name="slow", costs=costs, flags=EngineFlags(max_num_seqs=1, kv_tokens=4096))
        model_file.write_bytes(msgspec.json.encode(model))
        at = ("--database", database, "--model-file", str(model_file), "--slo", "P1=1000,1000", "--json")
        result = CliRunner().invoke(app, ["observe", "report", *at, *arguments])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return make


def test_attainment_gpu_seconds_and_gpus_needed(report: Callable[..., dict[str, Any]]) -> None:
    """Eight calls arrive together and take 0.5 s each. On N GPUs the first tokens come after 0.1 s, 0.6 s, 1.1 s, …, N
    at a time, so 2 N of them are within 1 s: 2 of 8 on one GPU, all on four."""
    found = report([a_call(number) for number in range(8)], "--price-per-hour", "3", "--target", "99")
    direct = found["arms"][0]
    assert (found["calls"], found["gpus"], direct["name"]) == (8, 1, "direct")
    assert direct["attainment"]["P1"] == direct["attainment"]["all"] == 2 / 8
    assert direct["gpu_seconds"] == pytest.approx(8 * 0.5)
    assert found["before"] == {"gpus": 4, "per_month": 4 * 3 * 730}
    assert found["after"] == {"gpus": 4, "per_month": 4 * 3 * 730}, "calls of one lane are not served sooner by lanes"
    assert report([], "--gpus", "4")["arms"][0]["attainment"]["P1"] == 1.0
    assert report([], "--max-gpus", "3")["before"] == {"gpus": None, "per_month": None}


def test_lanes_would_have_served_the_urgent_call_first(report: Callable[..., dict[str, Any]]) -> None:
    """Four calls of P2 arrive just before one of P0, which waits 2 s for them on an engine that serves in turn."""
    calls = [a_call(number, lane="P2") for number in range(4)] + [a_call(9, at=0.05, lane="P0")]
    direct, lanes, *_ = report(calls, "--slo", "P0=1000,1000")["arms"]
    assert (direct["attainment"]["P0"], lanes["attainment"]["P0"]) == (0.0, 1.0)
    assert direct["gpu_seconds"] == pytest.approx(2.5)


def test_affinity_would_have_computed_equal_beginnings_once(report: Callable[..., dict[str, Any]]) -> None:
    """Two prompts of 1,024 tokens, asked in turn on two GPUs by calls that are far apart: 1 s of prefill each time the
    GPU does not have the beginning, which in turn it never has."""
    decision = [
        msgspec.json.encode(
            Observed(ObservedFields(status=200, prompt_bytes=SLICE_BYTES * 17 // 16, prefix=(f"{digit * 16}",)))
        )
        for digit in "ab"
    ]
    order = "abba" * 4  # in turn, each GPU gets both
    calls = [
        a_call(number, at=10.0 * number, prompt=1088, decision=decision["ab".index(name)])
        for number, name in enumerate(order)
    ]
    arms = {one["name"]: one for one in report(calls, "--gpus", "2", prefill_token_s=1 / 1024)["arms"]}
    affinity = arms["lanes, coalescing, affinity"]["gpu_seconds"]
    once = 16 * (0.5 + 64 / 1024) + 2 * 1.0
    assert affinity == pytest.approx(once, rel=0.02)
    assert arms["direct"]["gpu_seconds"] > affinity + 1.5


def test_what_was_measured_estimated_and_left_out_is_stated(report: Callable[..., dict[str, Any]]) -> None:
    estimated = msgspec.json.encode(Observed(ObservedFields(status=200, is_estimated=True)))
    calls = [
        *(a_call(number, attained=number < 6) for number in range(8)),
        a_call(8, decision=estimated, attained=None),
        a_call(9, outcome=Outcome.FAILED, attained=None),
        a_call(10, prompt=5000, attained=None),
        a_call(11, worker="other"),
    ]
    found = report(calls)
    assert found["observed_attainment"] == {"P1": 6 / 8}
    assert found["estimated_tokens"] == pytest.approx(1 / 11)
    assert (found["calls"], found["left_out"]) == (9, 1)
    assert found["model"] == "slow", "the numbers of GPUs are those of this engine"


def test_an_empty_database_is_named(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'observed.db'}"
    AttemptStore(database).close()
    result = CliRunner().invoke(app, ["observe", "report", "--database", database])
    assert (result.exit_code, "no completed calls" in result.output.replace("\n", " ")) == (2, True)
