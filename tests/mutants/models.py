"""Checkpoints and their memory, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_LOADER = ("tests/engine/test_engine_loader.py",)
_MEMORY = ("tests/engine/test_engine_memory.py",)
_EQUALITY = ("tests/engine/test_transformers_equality.py",)

GROUP = MutantGroup(
    tests=(*_LOADER, *_EQUALITY, *_MEMORY),
    mutants=(
        Mutant(
            "the factor of YaRN is applied to queries or keys, not to both",
            "engine/model.py",
            "self.head_dim**-0.5 * self.rope_factor**2",
            "self.head_dim**-0.5 * self.rope_factor",
            _EQUALITY,
        ),
        Mutant(
            "a decode sees one token less than its window",
            "engine/runner.py",
            "hidden |= places < visible.unsqueeze(1) - window",
            "hidden |= places <= visible.unsqueeze(1) - window",
            _EQUALITY,
        ),
        Mutant(
            "a prompt sees one token more than its window",
            "engine/runner.py",
            "mask.triu_(diagonal=first - window + 1)",
            "mask.triu_(diagonal=first - window)",
            _EQUALITY,
        ),
        Mutant(
            "the window limits all layers",
            "engine/model.py",
            "mask if sliding_mask is None or index not in self.config.sliding_layers else sliding_mask",
            "mask if sliding_mask is None else sliding_mask",
            _EQUALITY,
        ),
        Mutant(
            "the window begins one layer late",
            "engine/checkpoint.py",
            "if layer >= first else",
            "if layer > first else",
            _LOADER,
        ),
        Mutant(
            "a window is used where it is switched off",
            "engine/checkpoint.py",
            'family in ("Qwen2", "Qwen3") and raw.get("use_sliding_window")',
            'family in ("Qwen2", "Qwen3")',
            _LOADER,
        ),
        Mutant(
            "only the first unsupported setting is named",
            "engine/checkpoint.py",
            'raise UnsupportedModel("; ".join(reasons))',
            "raise UnsupportedModel(reasons[0])",
            _LOADER,
        ),
        Mutant(
            "slices cut the heads that are paired",
            "engine/loader.py",
            "head_dim if part.is_rotated else 1",
            "2",
            _LOADER,
        ),
        Mutant(
            "biases of queries are not scaled",
            "engine/loader.py",
            'self._qkv(attention, "bias", scale)',
            'self._qkv(attention, "bias", 1.0)',
            _EQUALITY,
        ),
        Mutant(
            "tensors that no part of the model reads are ignored",
            "engine/loader.py",
            "        tensors.refuse_unread()\n",
            "",
            _LOADER,
        ),
        Mutant(
            "every interpolated frequency of YaRN is kept",
            "engine/rope.py",
            "keep = 1 - ramp.clamp(0, 1)",
            "keep = (1 - ramp).ceil().clamp(0, 1)",
            _EQUALITY,
        ),
        Mutant(
            "YaRN keeps the trained context",
            "engine/rope.py",
            'return max(positions, int(_yarn_factor(raw, rope) * rope["original_max_position_embeddings"]))',
            "return positions",
            _LOADER,
        ),
        Mutant(
            "a tied head costs nothing on a CPU",
            "engine/memory.py",
            "(is_cpu or not model.is_tied)",
            "not model.is_tied",
            _MEMORY,
        ),
        Mutant(
            "captured graphs are not counted",
            "engine/memory.py",
            "self.weights + self.adapters + self.kv_cache + self.workspace + self.graphs + self.runtime",
            "self.weights + self.adapters + self.kv_cache + self.workspace + self.runtime",
            _MEMORY,
        ),
        Mutant(
            "automatic KV ignores what others use",
            "engine/memory.py",
            "budget = min(config.memory_share * total_bytes, available_bytes)",
            "budget = config.memory_share * total_bytes",
            _MEMORY,
        ),
        Mutant(
            "automatic KV is more than sequences can use",
            "engine/memory.py",
            "max(0, min(blocks, usable)) * block",
            "max(0, blocks) * block",
            _MEMORY,
        ),
        Mutant(
            "an engine that fills the memory exactly is refused",
            "engine/memory.py",
            "if need.total <= available_bytes:",
            "if need.total < available_bytes:",
            _MEMORY,
        ),
        Mutant(
            "the workspace of blocks is not counted",
            "engine/memory.py",
            "int(left / (block * (self.kv_token_bytes + self._kv_workspace_bytes(config))))",
            "int(left / (block * self.kv_token_bytes))",
            _MEMORY,
        ),
        Mutant(
            "cached files count as used memory",
            "engine/device_memory.py",
            "left = int(limit) - int(used) + reclaimable",
            "left = int(limit) - int(used)",
            _MEMORY,
        ),
    ),
)
