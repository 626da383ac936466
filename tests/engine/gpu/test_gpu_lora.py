"""LoRA adapters on the device: tiles, kernels against their reference in Triton's interpreter, and the runner."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.gpu.gpu_steps import a_capacity, a_piece, packed_tensors, random_rows, spread
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.gpu.adapter_tiles import CHUNK_TILE, DECODE_TILE, adapter_tiles, max_tiles
from inferry.engine.gpu.buckets import bucket_for
from inferry.engine.gpu.graphs import Passes
from inferry.engine.gpu.kernels.lora import StackedAdapters, add_adapters, add_adapters_reference, splits_of
from inferry.engine.gpu.loading import load_runner
from inferry.engine.gpu.metadata import ADAPTER_TILES, Packed
from inferry.engine.gpu.runner import GpuRunner
from inferry.engine.messages import Request
from inferry.engine.peft_config import UnsupportedAdapter
from inferry.engine.planner import Work
from support.adapters import make_adapter, merged_model
from support.checkpoints import make_checkpoint, reference_model
from support.engine_fixtures import TIE, drain, greedy, shortfall

CPU = torch.device("cpu")
SLOTS = {7: 0, 8: 1, 9: 2}


def pieces_of(*adapters_and_tokens: tuple[int, int]) -> list[Work]:
    pieces = [a_piece(key, 3, tokens) for key, (_, tokens) in enumerate(adapters_and_tokens)]
    for piece, (adapter, _) in zip(pieces, adapters_and_tokens, strict=True):
        piece.sequence.adapter = adapter
    return pieces


@pytest.mark.parametrize("seed", range(20))
def test_every_row_with_an_adapter_is_in_one_tile_of_it(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.choice([1, 90])
    chosen = [(rng.choice([0, 7, 8, 9]), rng.randint(1, longest)) for _ in range(rng.randint(1, 60))]
    found = adapter_tiles(pieces_of(*chosen), SLOTS)
    by_row = np.repeat([SLOTS.get(adapter, -1) for adapter, _ in chosen], [tokens for _, tokens in chosen])
    if found is None:
        assert (by_row < 0).all()
        return
    has_chunks = max(tokens for _, tokens in chosen) > 1
    size = CHUNK_TILE if has_chunks else DECODE_TILE
    assert len(found.slots) <= max_tiles(len(by_row), len(SLOTS), has_chunks)
    seen: list[int] = []
    for slot, start, count in zip(found.slots, found.starts, found.counts, strict=True):
        rows = found.rows[start : start + count]
        assert 0 < len(rows) <= size
        assert (by_row[rows] == slot).all()
        seen += rows.tolist()
    assert sorted(seen) == np.flatnonzero(by_row >= 0).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("widths", [(40,), (150, 150), (300, 20, 20)])
@pytest.mark.parametrize("tokens", [1, 20], ids=["decodes", "chunks"])
def test_adapters_are_added_to_their_rows(dtype: torch.dtype, widths: tuple[int, ...], tokens: int) -> None:
    torch.manual_seed(3)
    inputs_width, rank = 1_100, 16
    chosen = [(7, 1), (0, tokens), (9, 1), (7, tokens), (9, 1), (0, 1), (8, 1)]
    pieces = spread(pieces_of(*sorted(chosen, key=lambda one: one[1])), blocks=256)
    packed, step = packed_tensors(pieces, a_capacity(adapters=3), slots=SLOTS)
    assert packed.adapter_tiles == int(step.counts[ADAPTER_TILES]) == 3
    stack = StackedAdapters(
        torch.randn(3, len(widths), rank, inputs_width).to(dtype) / 30,
        torch.randn(3, sum(widths), rank).to(dtype) / 4,
        widths,
    )
    rows = packed.rows + 3  # as in a captured pass, which is larger than the step
    inputs, actual = random_rows(rows, inputs_width, dtype), random_rows(rows, sum(widths), dtype)
    before, expected = actual.clone(), actual.clone()
    narrow = torch.full((rows * len(widths) * splits_of(inputs_width) * rank,), float("nan"))
    size = CHUNK_TILE if tokens > 1 else DECODE_TILE
    add_adapters(step, inputs, stack, narrow, actual, packed.adapter_tiles + 2, size)
    add_adapters_reference(step, inputs, stack, expected)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    without = [row for row, piece in enumerate(step.row_pieces[: packed.rows]) if not pieces[piece].sequence.adapter]
    assert torch.equal(actual[without], before[without])
    assert torch.equal(actual[packed.rows :], before[packed.rows :])
    assert not torch.allclose(actual[: packed.rows], before[: packed.rows])


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen2", shape=SHAPE)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        7: make_adapter(folder / "all", base, seed=1),
        8: make_adapter(folder / "some", base, seed=2, modules=["v_proj", "down_proj"], rank=3),
    }


def a_runner(base: Path, config: EngineConfig, adapters: dict[int, Path]) -> GpuRunner:
    runner = load_runner(base, config, CPU)
    assert runner.adapters is not None
    for adapter, directory in adapters.items():
        runner.adapters.load(adapter, directory)
    return runner


def assert_outputs(
    base: Path, adapters: dict[int, Path], requests: list[Request], outputs: dict[int, list[int]]
) -> None:
    models = {0: reference_model(base)} | {key: merged_model(base, path) for key, path in adapters.items()}
    for request in requests:
        output = outputs[request.key]
        with torch.inference_mode():
            logits = models[request.adapter](torch.tensor([[*request.prompt_ids, *output]])).logits[0]
        assert shortfall(logits, request.prompt_ids, output) < TIE, f"adapter {request.adapter}"


def requests_with(adapters: list[int]) -> list[Request]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 200) for _ in range(length)] for length in (3, 11, 1, 6, 9)]
    return [
        Request(key, prompt, greedy(4), 0, adapter=adapter, batch=adapter)
        for key, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]


@pytest.mark.parametrize("mode", ["continuous", "hybrid", "dynamic", "static"])
def test_tokens_of_mixed_adapters_are_those_of_merged_weights(mode: str, base: Path, adapters: dict[int, Path]) -> None:
    config = EngineConfig(mode=mode, max_sequences=5, kv_tokens=256, chunk_tokens=12, block_tokens=8, max_adapters=2)  # type: ignore[arg-type]
    core = EngineCore(a_runner(base, config, adapters), config)
    requests = requests_with([7, 0, 8, 7, 8])
    for request in requests:
        assert core.add(request) is None
    assert_outputs(base, adapters, requests, drain(core))


def test_a_slot_is_used_again_for_another_adapter(base: Path, adapters: dict[int, Path]) -> None:
    config = EngineConfig(max_sequences=5, kv_tokens=256, chunk_tokens=32, block_tokens=8, max_adapters=1)
    runner = a_runner(base, config, {7: adapters[7]})
    assert runner.adapters is not None
    runner.adapters.unload(7)
    runner.adapters.load(8, adapters[8])  # it has zeros where the first one had values
    core = EngineCore(runner, config)
    requests = requests_with([8, 0, 8, 8, 0])
    for request in requests:
        assert core.add(request) is None
    assert_outputs(base, adapters, requests, drain(core))


def test_an_adapter_that_does_not_fit_takes_no_slot(base: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    config = EngineConfig(max_sequences=2, kv_tokens=64, chunk_tokens=8, max_adapters=1)
    runner = a_runner(base, config, {})
    assert runner.adapters is not None
    with pytest.raises(UnsupportedAdapter, match="rank 32 exceeds max_adapter_rank 16"):
        runner.adapters.load(1, make_adapter(tmp_path / "wide", base, rank=32))
    runner.adapters.load(2, adapters[7])
    assert runner.adapters.slots == {2: 0}


def test_steps_without_adapters_run_in_passes_without_them(base: Path, adapters: dict[int, Path]) -> None:
    config = EngineConfig(max_sequences=8, kv_tokens=256, chunk_tokens=32, block_tokens=8, max_adapters=3)
    runner = a_runner(base, config, {})
    passes = Passes(runner._decoder)

    def tiles(adapter_tiles: int, *, rows: int = 5, chunk_tiles: int = 0) -> int:
        packed = Packed([], [], rows, 0 if chunk_tiles else rows, chunk_tiles, 0, adapter_tiles)
        shape = passes.shape_for(packed)
        assert shape is not None
        return shape.adapter_tiles

    assert tiles(0) == tiles(0, rows=20, chunk_tiles=2) == 0
    assert tiles(2) == bucket_for([3], 2) == max_tiles(8, 3, has_chunks=False)
    assert tiles(1, rows=20, chunk_tiles=2) == max_tiles(32, 3, has_chunks=True)
