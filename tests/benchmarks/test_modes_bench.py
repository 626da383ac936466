"""The benchmark of the engine's modes, with a runner of the test."""

from benchmarks.modes import ARMS, Workload, measure, report
from inferry.engine.bundled import BUNDLED_DIRECTORY
from inferry.engine.checkpoint import read_config
from support.engine_fixtures import FakeRunner

SMALL = Workload(
    batch=4,
    concurrency=8,
    jobs=16,
    prompt_tokens=(2, 20),
    mean_output_tokens=6,
    max_output_tokens=20,
    buckets=(5,),
    chunk_tokens=64,
    kv_tokens=1_024,
    block_tokens=4,
    vocabulary=97,
)


def test_all_modes_are_measured_with_any_runner() -> None:
    measured = measure(1, SMALL, FakeRunner)
    modes = measured["modes"]
    assert isinstance(modes, dict)
    assert list(modes) == [arm.name for arm in ARMS]
    assert modes["static"]["padding_of_decodes"] > modes["dynamic"]["padding_of_decodes"] > 0
    assert modes["static"]["padding_of_prompts"] > modes["static, prompts in buckets"]["padding_of_prompts"]
    for name in ("continuous", "hybrid"):
        assert modes[name]["padding_of_prompts"] == modes[name]["padding_of_decodes"] == 0
    assert report(measured).row_count == len(ARMS)


def test_prompts_have_tokens_of_the_bundled_model_only() -> None:
    assert Workload().vocabulary <= read_config(BUNDLED_DIRECTORY).vocab_size
