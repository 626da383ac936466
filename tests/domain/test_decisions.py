"""Decision records as text and as sentences."""

import msgspec
import pytest

from inferry.domain.decision_words import describe
from inferry.domain.decisions import Decision, from_text, to_fields, to_text

FULL = Decision(
    picked_by="cached_prefix",
    candidates=3,
    filtered={"serves_model": 2, "worker_down": 1},
    cached_tokens=512,
    held_by="siblings",
    held_s=0.004,
    limit="kv_tokens",
    limit_worker="gpu-a",
    waits={"kv_tokens": 0.8, "sequences": 0.1},
)


@pytest.mark.parametrize("decision", [FULL, Decision(picked_by="least_loaded", candidates=1), Decision()])
def test_a_text_is_json_and_reads_back(decision: Decision) -> None:
    text = to_text(decision)
    assert msgspec.json.decode(text) == to_fields(decision)
    assert from_text(text) == decision


def test_the_common_case_is_short() -> None:
    assert to_text(Decision(picked_by="least_loaded", candidates=1)) == '{"picked_by":"least_loaded","candidates":1}'


@pytest.mark.parametrize("text", [None, "", "[]", '{"waits_ms":[]}', '{"candidates":"x"}'])
def test_a_text_that_is_no_record_is_none(text: str | None) -> None:
    assert from_text(text) is None


def test_sentences() -> None:
    assert describe(FULL, "gpu-b") == (
        "Held 4.0 ms for siblings with the same prefix. "
        "Waited 800.0 ms for free KV tokens, 100.0 ms for a free sequence. "
        "Bound last by `kv_tokens` of gpu-a. "
        "Sent to gpu-b, which has the longest cached prefix of 3 candidates, "
        "with 512 prompt tokens expected in its cache. "
        "Other workers: 2 serve another model, 1 are down."
    )
    assert describe(Decision(picked_by="least_loaded", candidates=1), "w") == "Sent to w, which is the only candidate."
    assert describe(Decision(limit="no_worker", waits={"no_worker": 1.0}), None) == (
        "Waited 1000.0 ms for a worker of the model. Bound last by `no_worker`. Not sent to a worker."
    )
