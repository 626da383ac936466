"""Steps of a profile: what is sent to the runner, and that both runners compute it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from inferry.engine.checkpoint import UnsupportedModel, read_config
from inferry.engine.config import EngineConfig
from inferry.engine.dtypes import UnsupportedDtype
from inferry.engine.memory import OutOfMemory
from inferry.engine.planner import Work
from inferry.engine.profiling.kernels import CLASSES
from inferry.engine.profiling.measure import blocks_of, measure_step, work_of
from inferry.engine.profiling.result import Point
from inferry.engine.profiling.roofline import Piece, decode_pieces, prefill_pieces
from inferry.engine.profiling.runners import profiled_runner
from inferry.engine.profiling.session import ProfileSettings, run_profile
from support.checkpoints import make_checkpoint

CONFIG = EngineConfig(chunk_tokens=64, block_tokens=16, kv_tokens=512, threads=1)
SETTINGS = ProfileSettings(batch_sizes=(1, 2, 4), context_tokens=40, prompt_tokens=24, steps=2)


class Recorder:
    """A runner that only notes its work."""

    context_tokens, vocab_size, eos_ids = 100, 50, frozenset[int]()

    def __init__(self) -> None:
        self.steps: list[list[Work]] = []

    def execute(self, work: Sequence[Work]) -> list[int]:
        self.steps.append(list(work))
        return []


def test_every_sequence_has_blocks_of_its_own() -> None:
    pieces = [*decode_pieces(3, 40), *prefill_pieces(2, 24, 40)]
    work = work_of(pieces, block_tokens=16, vocab_size=50)
    assert [(one.sequence.computed, one.tokens) for one in work] == [(39, 1)] * 3 + [(0, 24), (0, 16)]
    assert [one.tokens == one.sequence.pending for one in work] == [True, True, True, True, False]
    blocks = [block for one in work for block in one.sequence.blocks]
    assert sorted(blocks) == list(range(blocks_of(pieces, 16)))
    assert max(token for one in work for token in one.sequence.tokens) < 50


def test_the_same_step_is_repeated() -> None:
    runner = Recorder()
    work = work_of(decode_pieces(2, 8), 16, 50)
    step_s, spent = measure_step(runner, work, steps=2)
    assert all(step == work for step in runner.steps)
    assert len(runner.steps) == (3 + 1) + (2 + 1) + (2 + 1)
    assert sum(spent.values()) == pytest.approx(step_s)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama-attention-bias"])
def test_random_weights_have_the_shapes_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    directory = make_checkpoint(tmp_path, family)
    (directory / "model.safetensors").unlink()
    runner = profiled_runner(directory, CONFIG, is_random=True)
    pieces = [*decode_pieces(2, 40), *prefill_pieces(1, 24, 64)]
    assert len(runner.execute(work_of(pieces, 16, runner.vocab_size))) == 3


def test_a_profile_has_a_point_for_every_size(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama")
    seen: list[Point] = []
    found = run_profile(directory, CONFIG, SETTINGS, is_random=False, on_point=seen.append)
    assert found.points == tuple(seen)
    assert [(point.batch, point.tokens) for point in found.phase("decode")] == [(1, 1), (2, 2), (4, 4)]
    # The third prompt fills the chunk.
    assert [(point.batch, point.tokens) for point in found.phase("prefill")] == [(1, 24), (2, 48), (4, 64)]
    for point in found.points:
        assert set(point.seconds_by_class) == set(CLASSES)
        assert sum(point.seconds_by_class.values()) == pytest.approx(point.step_s)
        assert point.seconds_by_class["matmul"] > 0
        assert point.bound in ("memory", "compute", "overhead")
    assert found.peak.bytes_per_s > 0
    assert found.peak.flops_per_s > 0
    assert found.dimensions["layers"] == read_config(directory).layers


def test_sizes_beyond_the_context_or_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, "llama")
    long = ProfileSettings(batch_sizes=(1,), context_tokens=300, prompt_tokens=24, steps=1)
    with pytest.raises(UnsupportedModel, match=r"300 tokens are above the model's context of 256"):
        run_profile(directory, CONFIG, long, is_random=False)
    monkeypatch.setattr("inferry.engine.runner.cpu_memory", lambda: (1 << 20, 1 << 20))
    with pytest.raises(OutOfMemory, match="more than the"):
        run_profile(directory, CONFIG, SETTINGS, is_random=False)


def test_a_dtype_that_the_cpu_lacks_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dtype: str) -> None:
        raise UnsupportedDtype(f"dtype {dtype}: not here")

    monkeypatch.setattr("inferry.engine.runner.check_cpu_dtype", refuse)
    monkeypatch.setattr("inferry.engine.profiling.session.measure_peak", lambda *_: pytest.fail("computed"))
    directory = make_checkpoint(tmp_path, "llama")
    with pytest.raises(UnsupportedDtype, match="dtype bfloat16: not here"):
        run_profile(directory, replace(CONFIG, dtype="bfloat16"), SETTINGS, is_random=False)


def test_the_runner_of_a_gpu_computes_the_same_step_again(tmp_path: Path) -> None:
    """On the CPU, by the interpreter of kernels."""
    from inferry.engine.gpu.loading import build_runner
    from inferry.engine.gpu.weights import random_weights

    directory = make_checkpoint(tmp_path, "llama", shape={"num_hidden_layers": 1})
    model, device = read_config(directory), torch.device("cpu")
    runner = build_runner(model, random_weights(model, torch.float32, device), CONFIG, device)
    work = work_of([*decode_pieces(1, 8), Piece(0, 4)], CONFIG.block_tokens, model.vocab_size)
    runner.launch(work)
    runner.launch(work)
    first, second = runner.collect(), runner.collect()
    assert first == second
    assert len(first) == 2
    step_s, _ = measure_step(runner, work, steps=1)
    assert step_s > 0
