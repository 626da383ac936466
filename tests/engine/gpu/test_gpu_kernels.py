"""Every kernel against its reference in torch, in Triton's interpreter.

The interpreter truncates to bfloat16 and has no product of such matrices: float16 stands for it.
"""

import pytest
import torch
from torch import Tensor

from engine.gpu.gpu_steps import a_cache, a_capacity, a_piece, packed_tensors, random_rows, spread
from inferry.engine.gpu.kernels.activation import silu_mul, silu_mul_reference
from inferry.engine.gpu.kernels.attention import (
    DecodeShape,
    Splits,
    attend_chunks,
    attend_decodes,
    attend_reference,
    chunk_tile,
)
from inferry.engine.gpu.kernels.embedding import embed, embed_reference
from inferry.engine.gpu.kernels.masks import mask_rows, mask_rows_reference
from inferry.engine.gpu.kernels.norms import add_norm, add_norm_reference
from inferry.engine.gpu.kernels.rotary import HeadNorms, Rotary, rotate_store, rotate_store_reference
from inferry.engine.gpu.kernels.thresholds import thresholds, thresholds_reference

ROUNDED = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(3)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the last place, which the order of a float32 sum can change."""
    tolerance = {torch.float32: 2e-6, torch.float16: 2**-9}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_rows_are_embedded_from_ids_of_the_host_and_of_the_device(dtype: torch.dtype) -> None:
    pieces = [a_piece(1, 4, 1), a_piece(2, 0, 5), a_piece(3, 7, 1)]
    pieces[2].sequence.tokens[7] = -1
    _, step = packed_tensors(spread(pieces), a_capacity(), {3: 2})
    table = random_rows(50, 24, dtype)
    sampled = torch.tensor([11, 12, 13])
    actual, expected = random_rows(12, 24, dtype), random_rows(12, 24, dtype)
    embed(step, sampled, table, actual)
    embed_reference(step, sampled, table, expected)
    assert torch.equal(actual, expected)
    assert torch.equal(actual[1], table[13])
    assert not actual[7:].any()


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_the_residual_is_added_and_normed(dtype: torch.dtype, has_added: bool, has_index: bool) -> None:
    residual, weight = random_rows(7, 48, dtype), random_rows(1, 48, dtype)[0]
    added = random_rows(7, 48, dtype) if has_added else None
    index = torch.tensor([5, 0, 3], dtype=torch.int32) if has_index else None
    other = residual.clone()
    actual, expected = (torch.empty(3 if has_index else 7, 48, dtype=dtype) for _ in range(2))
    add_norm(added, residual, weight, 1e-5, actual, index)
    add_norm_reference(added, other, weight, 1e-5, expected, index)
    assert_same(actual, expected)
    assert torch.equal(residual, other)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_gates_are_activated(dtype: torch.dtype) -> None:
    gate_up = random_rows(5, 2 * 40, dtype)
    actual, expected = (torch.empty(5, 40, dtype=dtype) for _ in range(2))
    silu_mul(gate_up, actual)
    silu_mul_reference(gate_up, expected)
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24), (2, 2, 32)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_keys_and_queries_are_rotated_and_stored(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, has_norms: bool
) -> None:
    _, step = packed_tensors(spread([a_piece(1, 12, 1), a_piece(2, 5, 9, more=2), a_piece(3, 0, 3)]), a_capacity())
    rotary = Rotary(random_rows(40, dim // 2, dtype), random_rows(40, dim // 2, dtype))
    norms = HeadNorms(random_rows(1, dim, dtype)[0], random_rows(1, dim, dtype)[0], 1e-6) if has_norms else None
    qkv = random_rows(16, (heads + 2 * kv_heads) * dim, dtype)
    cache = a_cache(kv_heads, dim, dtype)
    other, other_cache = qkv.clone(), type(cache)(*(one.clone() for one in cache))
    rotate_store(step, qkv, rotary, cache, norms)
    rotate_store_reference(step, other, rotary, other_cache, norms)
    queries = heads * dim
    assert_same(qkv[:, :queries], other[:, :queries])
    assert torch.equal(qkv[13:], other[13:])
    assert_same(cache.keys, other_cache.keys)
    assert torch.equal(cache.values, other_cache.values)


PIECES = {
    "one decode": [a_piece(1, 20, 1)],
    "decodes": [a_piece(1, 0, 1), a_piece(2, 100, 1), a_piece(3, 63, 1), a_piece(4, 64, 1)],
    "chunks": [a_piece(1, 0, 37), a_piece(2, 13, 20, more=4), a_piece(3, 0, 2)],
    "mixed": [a_piece(1, 33, 1), a_piece(2, 70, 1), a_piece(3, 0, 33), a_piece(4, 64, 8)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 16), (6, 2, 24)])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 21])
def test_attention_reads_the_keys_of_the_sequence(
    dtype: torch.dtype, name: str, heads: int, kv_heads: int, dim: int, splits: int, window: int | None
) -> None:
    capacity = a_capacity(tile_queries=chunk_tile(dtype) // (heads // kv_heads))
    packed, step = packed_tensors(spread(PIECES[name]), capacity)
    rows = packed.rows + 3
    qkv = random_rows(rows, (heads + 2 * kv_heads) * dim, dtype)
    cache = a_cache(kv_heads, dim, dtype)
    actual, expected = (torch.zeros(rows, heads * dim, dtype=dtype) for _ in range(2))
    scratch = Splits(torch.randn(rows, heads, splits, dim), torch.randn(rows, heads, splits))
    shape = DecodeShape(splits=splits, min_keys=32, block_keys=32)
    if packed.decodes:
        attend_decodes(step, qkv, cache, actual, packed.decodes + 2, scratch, shape, window)
    if packed.tiles:
        attend_chunks(step, qkv, cache, actual, packed.tiles + 2, window)
    attend_reference(step, qkv, cache, expected, window)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (7, 1.0), (70, 0.5), (70, 0.9), (9, 0.3), (70, 1e-6), (5, 0.0)])
def test_the_least_kept_weight_is_found(top_k: int, top_p: float) -> None:
    weights = torch.randn(3, 70).mul(3).softmax(dim=-1)
    weights[0, 5:] = 0.0
    limits = (torch.full((3,), float(top_k), dtype=torch.float64), torch.full((3,), top_p, dtype=torch.float64))
    kept = [
        weights >= found.unsqueeze(1)
        for found in (thresholds(weights, *limits), thresholds_reference(weights, *limits))
    ]
    assert torch.equal(kept[0] & (weights > 0), kept[1])


@pytest.mark.parametrize("width", [400, 4_095, 9_000])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_masks_exclude_tokens_of_their_rows_alone(dtype: torch.dtype, width: int) -> None:
    logits = random_rows(5, width, dtype)
    masks = torch.randint(-(2**31), 2**31, (2, -(-width // 32)), dtype=torch.int32)
    rows = torch.tensor([3, 1])
    masked, expected = logits.clone(), logits.clone()
    mask_rows(masked, rows, masks)
    mask_rows_reference(expected, rows, masks)
    assert torch.equal(masked, expected)
    assert torch.equal(masked[[0, 2, 4]], logits[[0, 2, 4]])
    bits = [(int(masks[0, token // 32]) >> (token % 32)) & 1 for token in range(width)]
    assert torch.equal(masked[3] == logits[3], torch.tensor(bits).bool())
