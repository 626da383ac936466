# ruff: noqa: B023 (every closure is called before its loop goes on)
"""Matrix products and attention of the 8B shape on a GPU, by size. Every figure is the median of graph replays.

Inputs rotate over several copies, so that no weight is read from the L2 cache.
"""

import random
import statistics
from collections.abc import Callable

import numpy as np
import torch

from inferry.domain.sampling import Sampling
from inferry.engine.gpu.kernels import attention
from inferry.engine.gpu.metadata import Capacity, host_sections, pack, section_lengths
from inferry.engine.gpu.tensors import LayerCache, StepTensors, step_tensors
from inferry.engine.planner import Work
from inferry.engine.sequences import Sequence

MATRICES = {
    "qkv": (6_144, 4_096),
    "out": (4_096, 4_096),
    "gate_up": (28_672, 4_096),
    "down": (4_096, 14_336),
    "head": (128_256, 4_096),
}
CHUNK_SHAPES = tuple(
    attention.ChunkShape(*how) for how in ((64, 8, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3), (64, 4, 3))
)


def microseconds(launches: list[Callable[[], None]], repeats: int = 12) -> float:
    """Time of one launch, from replays of a graph of all of them."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    spent = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) * 1e3 / len(launches))
    return float(statistics.median(spent))


def measure_products() -> None:
    for name, (width_out, width_in) in MATRICES.items():
        copies = max(2, min(8, int(4e9 // (width_out * width_in * 2))))
        weights = [torch.randn(width_out, width_in, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        turned = [weight.t().contiguous() for weight in weights]
        size = width_out * width_in * 2
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            x = torch.randn(rows, width_in, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(rows, width_out, device="cuda", dtype=torch.bfloat16)
            figures = {
                "cublas [out,in]": microseconds([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights]),  # type: ignore[misc]
                "cublas [in,out]": microseconds([lambda w=w: torch.mm(x, w, out=out) for w in turned]),  # type: ignore[misc]
            }
            print(
                f"   {name:8s} rows={rows:4d} "
                + ", ".join(f"{label} {us:.1f} us = {size / us / 1e6:.2f} TB/s" for label, us in figures.items()),
                flush=True,
            )


def a_step(lengths: list[tuple[int, int]], blocks: int) -> StepTensors:
    generator = random.Random(1)
    free = list(range(blocks))
    generator.shuffle(free)
    work = []
    for key, (computed, tokens) in enumerate(lengths):
        sequence = Sequence(
            key, [1] * (computed + tokens), sampling=Sampling(temperature=0.0), lane=0, arrival=key, limit=10_000
        )
        sequence.computed = computed
        need = -(-(computed + tokens) // 32)
        sequence.blocks, free = free[:need], free[need:]
        work.append(Work(sequence, tokens))
    capacity = Capacity(rows=8_448, pieces=256, blocks=16_384, tile_queries=32, block_tokens=32)
    array = np.zeros(sum(section_lengths(capacity).values()), dtype=np.int32)
    pack(work, capacity, host_sections(capacity, array), {})
    return step_tensors(capacity, torch.from_numpy(array).cuda())


def measure_decodes() -> None:
    heads, kv_heads, dim = 32, 8, 128
    caches = [
        LayerCache(*(torch.randn(8_192, kv_heads, 32, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
        for _ in range(4)
    ]
    qkv = torch.randn(256, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(256, heads * dim, device="cuda", dtype=torch.bfloat16)
    for rows, length in ((1, 576), (1, 8_000), (8, 576), (32, 576), (128, 576), (256, 576), (32, 4_000)):
        step = a_step([(length - 1, 1)] * rows, 8_192)
        size = 2 * rows * length * kv_heads * dim * 2
        figures = {}
        for splits, min_keys in ((1, 64), (4, 64), (4, 256), (4, 1_024), (8, 64), (8, 128), (16, 64), (32, 64)):
            if rows * splits > 1_024:
                continue
            scratch = attention.Splits(
                torch.empty(rows, heads, splits, dim, device="cuda"), torch.empty(rows, heads, splits, device="cuda")
            )
            for block_keys, warps, stages in ((32, 2, 3), (64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 4, 2), (128, 8, 2)):
                shape = attention.DecodeShape(splits, max(min_keys, block_keys), block_keys, warps, stages)
                try:
                    figures[str(tuple(shape))] = microseconds(
                        [
                            lambda cache=cache: attention.attend_decodes(  # type: ignore[misc]
                                step,
                                qkv[:rows],
                                cache,
                                out[:rows],
                                rows,
                                scratch,
                                shape,
                            )
                            for cache in caches
                        ]
                    )
                except Exception as error:
                    print(f"   {shape}: {type(error).__name__}")
        best = sorted(figures.items(), key=lambda item: item[1])
        print(
            f"   decodes={rows} keys={length}: "
            + ", ".join(f"{label} {us:.1f} us = {size / us / 1e6:.2f} TB/s" for label, us in best[:5])
            + f"; worst {best[-1][1]:.1f}",
            flush=True,
        )


def measure_chunks() -> None:
    heads, kv_heads, dim = 32, 8, 128
    cache = LayerCache(*(torch.randn(8_192, kv_heads, 32, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    for lengths in ([(0, 512)], [(0, 512)] * 16, [(0, 8_192)], [(2_048, 2_048)], [(8_192, 2_048)]):
        rows = sum(tokens for _, tokens in lengths)
        step = a_step(lengths, 8_192)
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, heads * dim, device="cuda", dtype=torch.bfloat16)
        tiles = sum(-(-tokens // 32) for _, tokens in lengths)
        work = sum(4 * heads * dim * tokens * (seen + tokens / 2) for seen, tokens in lengths)
        figures = {}
        for shape in CHUNK_SHAPES:
            try:
                figures[str(tuple(shape))] = microseconds(
                    [lambda: attention.attend_chunks(step, qkv, cache, out, tiles, None, shape)] * 4
                )
            except Exception as error:
                print(f"   {shape}: {type(error).__name__}")
        q, k, v = (torch.randn(1, heads, lengths[0][1], dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        torch_us = microseconds(
            [lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)] * 4  # type: ignore[list-item]
        )
        best = sorted(figures.items(), key=lambda item: item[1])
        print(
            f"   chunks {len(lengths)} x {lengths[0]}: "
            + ", ".join(f"{label} {us:.1f} us = {work / us / 1e6:.0f} TFLOP/s" for label, us in best[:5])
            + f"; one without paging or context in torch: {torch_us:.1f} us",
            flush=True,
        )


MEASUREMENTS: dict[str, Callable[[], None]] = {
    "attention of chunks": measure_chunks,
    "attention of decodes": measure_decodes,
    "matrix products": measure_products,
}
