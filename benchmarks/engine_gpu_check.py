"""Correctness of the engine on a GPU: kernels against their references, small models against transformers."""

import random
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.gpu.kernels import activation, attention, embedding, masks, norms, rotary
from inferry.engine.gpu.loading import load_runner
from inferry.engine.gpu.metadata import Capacity, Packed, host_sections, pack, section_lengths
from inferry.engine.gpu.runner import GpuRunner
from inferry.engine.gpu.tensors import LayerCache, StepTensors, step_tensors
from inferry.engine.messages import Request
from inferry.engine.planner import Work
from inferry.engine.runner import TorchRunner
from inferry.engine.sequences import Sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCK_TOKENS = 32


def a_step(
    lengths: list[tuple[int, int]],
    group: int,
    dtype: torch.dtype,
    adapters: list[int] | None = None,
    slots: dict[int, int] | None = None,
) -> tuple[Packed, StepTensors]:
    """A step of pieces given as (computed, tokens), with blocks in random order. `adapters`: of each piece."""
    generator = random.Random(1)
    free = list(range(512))
    generator.shuffle(free)
    work = []
    for key, (computed, tokens) in enumerate(lengths):
        ids = [generator.randrange(1, 1_000) for _ in range(computed + tokens)]
        sequence = Sequence(key, ids, sampling=Sampling(temperature=0.0), lane=0, arrival=key, limit=10_000)
        sequence.computed = computed
        sequence.adapter = adapters[key] if adapters else 0
        need = -(-len(ids) // BLOCK_TOKENS)
        sequence.blocks, free = free[:need], free[need:]
        work.append(Work(sequence, tokens))
    capacity = Capacity(
        rows=4_096,
        pieces=64,
        blocks=1_024,
        tile_queries=attention.chunk_tile(dtype) // group,
        block_tokens=BLOCK_TOKENS,
        adapters=len(slots or ()),
    )
    array = np.full(sum(section_lengths(capacity).values()), 1 << 20, dtype=np.int32)
    packed = pack(work, capacity, host_sections(capacity, array), {}, slots)
    return packed, step_tensors(capacity, torch.from_numpy(array).to(DEVICE))


def rows_of(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width, device=DEVICE).to(dtype)


def assert_near(name: str, actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    limit = scale * TOLERANCES[expected.dtype]
    print(f"   {name:42s} {expected.dtype!s:16s} relative error {error:.2e}")
    assert error <= limit, f"{name}: {error} > {limit}"


def check_elementwise() -> None:
    for dtype in DTYPES:
        packed, step = a_step([(100, 1), (3, 1), (0, 200), (64, 31)], 4, dtype)
        table, sampled = rows_of(1_000, 4_096, dtype), torch.zeros(64, dtype=torch.int64, device=DEVICE)
        pair = [torch.empty(packed.rows + 5, 4_096, dtype=dtype, device=DEVICE) for _ in range(2)]
        embedding.embed(step, sampled, table, pair[0])
        embedding.embed_reference(step, sampled, table, pair[1])
        assert torch.equal(*pair)
        added, weight = rows_of(packed.rows + 5, 4_096, dtype), rows_of(1, 4_096, dtype)[0]
        residuals, outs = [pair[0].clone() for _ in range(2)], [torch.empty_like(pair[0]) for _ in range(2)]
        norms.add_norm(added, residuals[0], weight, 1e-5, outs[0])
        norms.add_norm_reference(added, residuals[1], weight, 1e-5, outs[1])
        assert torch.equal(*residuals)
        assert_near("norm", outs[0], outs[1])
        gate_up = rows_of(300, 2 * 14_336, dtype)
        outs = [torch.empty(300, 14_336, dtype=dtype, device=DEVICE) for _ in range(2)]
        activation.silu_mul(gate_up, outs[0])
        activation.silu_mul_reference(gate_up, outs[1])
        assert_near("activation", outs[0], outs[1])
        for heads, kv_heads, dim in ((32, 8, 128), (28, 4, 128), (14, 2, 64)):
            for has_norms in (False, True):
                check_rotary(packed, step, heads, kv_heads, dim, dtype, has_norms)


def check_masks() -> None:
    for dtype in DTYPES:
        for width in (4_096, 128_256, 151_936):
            logits = rows_of(16, width, dtype)
            pair = [logits.clone(), logits]
            bits = torch.randint(-(2**31), 2**31, (5, -(-width // 32)), dtype=torch.int32, device=DEVICE)
            rows = torch.tensor([15, 0, 7, 3, 8], device=DEVICE)
            masks.mask_rows(pair[0], rows, bits)
            masks.mask_rows_reference(pair[1], rows, bits)
            assert torch.equal(*pair), f"masks of {width} tokens"


def check_rotary(
    packed: Packed, step: StepTensors, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    tables = rotary.Rotary(rows_of(400, dim // 2, dtype), rows_of(400, dim // 2, dtype))
    weights = rotary.HeadNorms(rows_of(1, dim, dtype)[0], rows_of(1, dim, dtype)[0], 1e-6) if has_norms else None
    qkvs = [rows_of(packed.rows + 5, (heads + 2 * kv_heads) * dim, dtype)]
    qkvs.append(qkvs[0].clone())
    caches = [a_cache(kv_heads, dim, dtype)]
    caches.append(LayerCache(*(one.clone() for one in caches[0])))
    rotary.rotate_store(step, qkvs[0], tables, caches[0], weights)
    rotary.rotate_store_reference(step, qkvs[1], tables, caches[1], weights)
    assert_near(f"rotary {heads}/{kv_heads}/{dim} norms={has_norms}", qkvs[0], qkvs[1])
    assert_near("keys", caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)


def a_cache(kv_heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    shape = (512, kv_heads, BLOCK_TOKENS, dim)
    return LayerCache(*(torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2)))


def check_attention() -> None:
    from inferry.engine.gpu.decoder import decode_shape

    steps = {
        "decodes": [(0, 1), (511, 1), (512, 1), (3_000, 1), (33, 1)],
        "chunks": [(0, 512), (0, 2), (700, 130), (31, 33)],
        "mixed": [(600, 1), (1_000, 1), (0, 300), (2_000, 64)],
    }
    for dtype in DTYPES:
        for heads, kv_heads, dim in ((32, 8, 128), (28, 4, 128), (14, 2, 64), (4, 4, 96)):
            for name, lengths in steps.items():
                for window in (None, 200) if heads == 32 else (None,):
                    packed, step = a_step(lengths, heads // kv_heads, dtype)
                    qkv = rows_of(packed.rows, (heads + 2 * kv_heads) * dim, dtype)
                    cache = a_cache(kv_heads, dim, dtype)
                    outs = [torch.zeros(packed.rows, heads * dim, dtype=dtype, device=DEVICE) for _ in range(2)]
                    if packed.decodes:
                        for grid in (packed.decodes, 64):
                            shape = decode_shape(grid, kv_heads)
                            splits = attention.Splits(
                                torch.randn(grid, heads, shape.splits, dim, device=DEVICE),
                                torch.randn(grid, heads, shape.splits, device=DEVICE),
                            )
                            attention.attend_decodes(step, qkv, cache, outs[0], grid, splits, shape, window)
                    if packed.tiles:
                        attention.attend_chunks(step, qkv, cache, outs[0], packed.tiles + 9, window)
                    attention.attend_reference(step, qkv, cache, outs[1], window)
                    assert_near(f"{name} {heads}/{kv_heads}/{dim} window={window}", outs[0], outs[1])


COMMON: dict[str, Any] = {
    "vocab_size": 1_000, "hidden_size": 512, "intermediate_size": 1_024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2_048, "eos_token_id": 7,
    "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.05,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 64}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Mistral with a window": ("MistralConfig", {"sliding_window": 64}),
}
MAX_ERROR_RATIO = 1.15
"""Limit of the engine's error in a rounded dtype, in errors of transformers in that dtype."""

CASES = {
    "whole prompts": EngineConfig(max_sequences=24, kv_tokens=32_768, chunk_tokens=2_048),
    "chunks of 50": EngineConfig(max_sequences=24, kv_tokens=32_768, chunk_tokens=50),
    "preemptions": EngineConfig(max_sequences=24, kv_tokens=2_048, chunk_tokens=300, block_tokens=16),
}


class Recording:
    """A runner that keeps the logits of every sampled token, by key."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.context_tokens, self.vocab_size, self.eos_ids = runner.context_tokens, runner.vocab_size, runner.eos_ids
        self.execute, self.collect = runner.execute, runner.collect
        self.logits: dict[int, list[Tensor]] = {}

    def launch(self, work: Ordered[Work]) -> None:
        in_rows = sorted(work, key=lambda piece: piece.tokens > 1)
        ending = [piece.sequence.key for piece in in_rows if piece.tokens == piece.sequence.pending]
        self._runner.launch(work)
        logits = self._runner.logits[: len(ending)].to(torch.float32, copy=True)
        for key, row in zip(ending, logits, strict=True):
            self.logits.setdefault(key, []).append(row)


def check_family(family: str, dtype: torch.dtype) -> None:
    """Outputs of a small random model against transformers on the same device and in the same dtype."""
    import transformers

    name, settings = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, name)(**COMMON, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval()
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        wide = transformers.AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).to(DEVICE).eval()
        failed = [case for case in CASES if not check_case(case, Path(scratch), model, wide)]
        if dtype == torch.float32:
            check_draws(Path(scratch), CASES["whole prompts"])
    assert not failed, f"{failed}: less exact than transformers"


def check_case(case: str, directory: Path, model: Any, wide: Any) -> bool:
    """Whether the engine's logits are as near to those of `wide`, in float32, as those of `model`."""
    config, prompts = CASES[case], some_prompts()
    recording = Recording(load_runner(directory, config, torch.device(DEVICE)))
    core = EngineCore(recording, config)
    sampling = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for key, prompt in enumerate(prompts):
        assert core.add(Request(key, prompt, sampling, lane=0)) is None
    outputs: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
    while core.has_work:
        for key, token in core.step().tokens:
            outputs[key].append(token)
    assert core.pool.free == core.pool.total
    # By token: sums over the vocabulary of the squared error of the engine, and of transformers.
    errors, squares, same = [], 0.0, 0
    for key, prompt in enumerate(prompts):
        chosen = torch.tensor(outputs[key], device=DEVICE).unsqueeze(1)
        ours = torch.stack(recording.logits[key])
        assert len(chosen) == len(ours) == OUTPUT_TOKENS
        assert torch.equal(ours.gather(1, chosen), ours.max(dim=1, keepdim=True).values), "not the best token"
        ids = torch.tensor([prompt + outputs[key]], device=DEVICE)
        with torch.inference_mode():
            theirs, exact = (one(ids).logits[0, len(prompt) - 1 : -1].float() for one in (model, wide))
        errors.append(torch.stack([(one - exact).pow(2).sum(dim=1) for one in (ours, theirs)]))
        squares += float(exact.pow(2).sum())
        same += int((theirs.gather(1, chosen) == theirs.max(dim=1, keepdim=True).values).sum())
    own, other = (float(part.sum() / squares) ** 0.5 for part in torch.cat(errors, dim=1))
    stats = core.stats()
    print(
        f"   {case:14s} relative error to float32 {own:.3e}, of transformers {other:.3e}; best token of transformers "
        f"in {same}/{len(prompts) * OUTPUT_TOKENS}; {stats.steps} steps, {stats.preemptions} preemptions",
        flush=True,
    )
    # In float32 transformers itself is the reference.
    return bool(own <= max(MAX_ERROR_RATIO * other, TOLERANCES[torch.float32]))


OUTPUT_TOKENS = 40


def some_prompts() -> list[list[int]]:
    generator = random.Random(2)
    return [[generator.randrange(8, 1_000) for _ in range(generator.choice([1, 5, 40, 333]))] for _ in range(32)]


def check_draws(directory: Path, config: EngineConfig) -> None:
    """Seeded draws equal those of the CPU; stop tokens end a sequence at the right token."""
    prompts = some_prompts()[:8]
    runners = (load_runner(directory, config, torch.device(DEVICE)), TorchRunner.load(directory, config))
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=50, max_tokens=30, seed=5)
    found = []
    for runner in runners:
        core = EngineCore(runner, config)
        outputs: dict[int, list[int]] = {}
        ends: dict[int, tuple[bool, int]] = {}
        for key, prompt in enumerate(prompts):
            assert core.add(Request(key, prompt, sampling, lane=0)) is None
        while core.has_work:
            done = core.step()
            for key, token in done.tokens:
                outputs.setdefault(key, []).append(token)
            ends |= {end.account.key: (end.stopped, end.account.output_tokens) for end in done.ends}
        found.append((outputs, ends))
    same = sum(found[0][0][key] == found[1][0][key] for key in found[0][0])
    print(f"   seeded draws: {same}/{len(prompts)} sequences equal the CPU's; stopped early: "
          f"{sum(stopped for stopped, _ in found[0][1].values())}")  # fmt: skip
    assert same >= len(prompts) - 1, "draws differ"


CHECKS: dict[str, Callable[[], None]] = {
    "elementwise kernels": check_elementwise,
    "masks of grammars": check_masks,
    "attention": check_attention,
    **{
        f"{family} in {dtype}": partial(check_family, family, dtype)
        for family in FAMILIES
        for dtype in (torch.float32, torch.bfloat16)
    },
}
