"""Outputs under random schemas in every mode, preempted and resumed."""

import json
import random
from pathlib import Path

import jsonschema_rs
import pytest

from inferry.domain.sampling import Sampling
from inferry.domain.workers import EngineMode
from inferry.engine.config import EngineConfig
from support.grammar_fixtures import SETTINGS, TICKET, GrammarEngine, a_request, a_schema, of_schema


@pytest.mark.parametrize("mode", ["continuous", "hybrid", "dynamic", "static"])
def test_random_schemas_give_valid_json_in_every_mode(tiny_dir: Path, mode: EngineMode) -> None:
    generator = random.Random(mode)
    schemas = [a_schema(generator) for _ in range(40)]
    requests = [
        a_request(key, of_schema(schema), sampling=SETTINGS[key % len(SETTINGS)]) for key, schema in enumerate(schemas)
    ]
    engine = GrammarEngine(tiny_dir, EngineConfig(mode=mode, max_sequences=16, threads=1)).run(requests)
    finished = 0
    for key, schema in enumerate(schemas):
        end = engine.ends[key]
        assert end.error is None, schema
        if end.stopped:
            finished += 1
            assert jsonschema_rs.is_valid(schema, json.loads(engine.text(key))), (schema, engine.text(key))
        else:
            assert len(engine.outputs[key]) == 400
    assert finished >= 38  # greedy output may repeat until its limit


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "seed", "top_p", "top_k"])
def test_an_output_is_the_same_alone_preempted_and_resumed(tiny_dir: Path, sampling: Sampling) -> None:
    constraint = of_schema(TICKET)
    requests = [a_request(key, constraint, sampling=sampling, prompt=[key + 5] * 9) for key in range(4)]
    alone: dict[int, list[int]] = {}
    for request in requests:
        alone |= GrammarEngine(tiny_dir).run([request]).outputs
    scarce = EngineConfig(kv_tokens=96, block_tokens=8, chunk_tokens=16, max_sequences=4)
    crowded = GrammarEngine(tiny_dir, scarce).run(requests)
    assert crowded.core.stats().preemptions > 0
    assert crowded.outputs == alone
    whole, resumed = alone[0], GrammarEngine(tiny_dir)
    for written in range(1, len(whole) + 1):
        prompt = [*requests[0].prompt_ids, *whole[:written]]
        resumed.run([a_request(written, constraint, sampling=sampling, prompt=prompt, output_ids=written)])
        assert resumed.outputs.get(written, []) == whole[written:]
        assert resumed.ends[written].stopped
