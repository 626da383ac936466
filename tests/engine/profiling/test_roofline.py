"""The work of a step by the model's shape, and the transition from memory- to compute-bound."""

from dataclasses import replace

import pytest
import torch

from inferry.engine.memory import MemoryModel
from inferry.engine.model import ModelConfig
from inferry.engine.profiling.kernels import CLASSES, idle_share, kernel_class, seconds_by_class
from inferry.engine.profiling.roofline import (
    DevicePeak,
    Piece,
    StepWork,
    bound_of,
    decode_pieces,
    measured_transition,
    prefill_pieces,
    product_transition,
    roofline_transition,
    step_work,
)

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden=4_096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    norm_eps=1e-5,
    context_tokens=8_192,
    rope_inverse_frequencies=torch.ones(64),
    eos_ids=frozenset(),
)
H200 = DevicePeak(4.0e12, 0.8e15)


def test_one_decode_reads_every_weight_once_and_uses_it_twice() -> None:
    work = step_work(LLAMA_8B, decode_pieces(1, 1), 2)
    matrices = MemoryModel(LLAMA_8B, "bfloat16", "cuda").weight_bytes - 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden
    assert work.moved_bytes == pytest.approx(matrices, rel=0.001)
    assert work.flops == pytest.approx(matrices, rel=0.001)  # two operations for each value of two bytes


def test_each_sequence_adds_operations_and_its_keys_and_values() -> None:
    one, many = (step_work(LLAMA_8B, decode_pieces(count, 512), 2) for count in (1, 65))
    token_bytes = MemoryModel(LLAMA_8B, "bfloat16", "cuda").kv_token_bytes
    assert many.flops == 65 * one.flops
    assert many.moved_bytes - one.moved_bytes == pytest.approx(64 * (512 + 1) * token_bytes, rel=0.001)


def test_a_prompt_sees_half_of_its_square_and_samples_once() -> None:
    alone = step_work(LLAMA_8B, [Piece(0, 100)], 2)
    cut = step_work(LLAMA_8B, [Piece(0, 100, is_sampled=False)], 2)
    head = LLAMA_8B.hidden * LLAMA_8B.vocab_size
    assert (alone.flops - cut.flops, alone.moved_bytes - cut.moved_bytes) == (2 * head, 2 * head)
    halves = [step_work(LLAMA_8B, [Piece(first, 50, first > 0)], 2).flops for first in (0, 50)]
    assert sum(halves) == alone.flops


def test_a_window_limits_what_is_read_and_multiplied() -> None:
    windowed = replace(LLAMA_8B, window=64, sliding_layers=frozenset(range(32)))
    full, limited = (step_work(model, decode_pieces(4, 512), 2) for model in (LLAMA_8B, windowed))
    assert limited.flops < full.flops
    assert limited.moved_bytes < full.moved_bytes
    assert step_work(windowed, decode_pieces(4, 32), 2) == step_work(LLAMA_8B, decode_pieces(4, 32), 2)


def test_prompts_fill_a_chunk_and_the_last_one_is_cut() -> None:
    assert prefill_pieces(2, 100, 256) == [Piece(0, 100), Piece(0, 100)]
    assert prefill_pieces(8, 100, 256) == [Piece(0, 100), Piece(0, 100), Piece(0, 56, is_sampled=False)]
    assert prefill_pieces(1, 300, 256) == [Piece(0, 256, is_sampled=False)]


def test_the_transition_is_where_operations_take_longer_than_bytes() -> None:
    found = roofline_transition(LLAMA_8B, 128, 2, H200)
    assert found is not None
    for batch, bound in ((found - 1, "memory"), (found, "compute")):
        assert bound_of(step_work(LLAMA_8B, decode_pieces(batch, 128), 2), H200, idle_share=0.0) == bound
    assert product_transition(2, H200) == 200
    assert roofline_transition(LLAMA_8B, 8_192, 2, H200) is None


def test_a_step_that_mostly_waits_is_bound_by_overhead() -> None:
    work = StepWork(flops=1.0, moved_bytes=1.0)
    assert bound_of(work, DevicePeak(1.0, 2.0), idle_share=0.6) == "overhead"
    assert bound_of(work, DevicePeak(1.0, 2.0), idle_share=0.4) == "memory"
    assert bound_of(work, DevicePeak(2.0, 1.0), idle_share=0.4) == "compute"


def test_the_measured_transition_is_where_products_begin_to_grow_with_the_batch() -> None:
    assert measured_transition([(1, 1.0), (2, 1.0), (4, 1.0), (8, 2.0), (16, 4.0)]) == 4
    assert measured_transition([(1, 1.1), (2, 0.9), (4, 1.2), (8, 1.7), (16, 4.4), (32, 7.6)]) in (4, 5)
    assert measured_transition([(1, 1.0), (2, 2.0), (4, 4.0)]) == 1
    assert measured_transition([(1, 1.0), (2, 1.0), (4, 1.1), (8, 1.2)]) is None
    assert measured_transition([(1, 1.0)]) is None
    assert measured_transition([(1, 0.0), (2, 0.0)]) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("aten::mm", "matmul"),
        ("aten::addmm_", "matmul"),
        ("_attend", "attention"),
        ("_combine", "attention"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_add_norm", "elementwise"),
        ("_silu_mul", "elementwise"),
        ("_rotate_store", "elementwise"),
        ("_embed", "elementwise"),
        ("aten::silu", "elementwise"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::ArgMaxOps>>",
            "sampling",
        ),
        ("_thresholds", "sampling"),
        ("aten::argmax", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("aten::index_select", "copies"),
        ("aten::copy_", "copies"),
    ],
)
def test_kernels_have_classes(name: str, kind: str) -> None:
    assert kernel_class(name) == kind


def test_the_time_of_a_step_is_divided_among_classes() -> None:
    spent = seconds_by_class([("_attend", 1.0), ("aten::mm", 2.0), ("_combine", 0.5)], step_s=5.0)
    assert spent == {**dict.fromkeys(CLASSES, 0.0), "attention": 1.5, "matmul": 2.0, "idle": 1.5}
    assert idle_share(spent) == 0.3
    slowed = seconds_by_class([("_attend", 2.0), ("aten::mm", 6.0)], step_s=4.0)
    assert (slowed["attention"], slowed["matmul"], slowed["idle"]) == (1.0, 3.0, 0.0)
    assert seconds_by_class([], step_s=1.0)["idle"] == 1.0
