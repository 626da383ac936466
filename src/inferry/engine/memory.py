"""Estimates the memory that a model needs, and sizes the KV cache, the batch and the context for a budget. Pure.

Weights and KV cache are exact: they follow the layout of `engine.loader` and `engine.model`. The workspace is the peak
of a step with `max_sequences` decodes and a full chunk, at full context and with a full KV cache.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from inferry.domain.routes import Task
from inferry.engine.config import MEMORY_SHARE, Device, EngineConfig
from inferry.engine.model import ModelConfig
from inferry.engine.sampling import DRAWN_LOGIT_BYTES, MAX_DRAWN_LOGITS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RUNTIME_BYTES: dict[Device, int] = {"cpu": 250 << 20, "cuda": 600 << 20}
"""What a process needs before a model: Python and torch, or the CUDA context with the workspaces of its libraries."""
GRAPH_BYTES: dict[Device, int] = {"cpu": 0, "cuda": 2 << 30}
"""What is kept for captured CUDA graphs, compiled kernels and the workspace of cuBLAS."""
PROFILES = {"throughput": MEMORY_SHARE, "latency": 0.25}
"""Share of a device's memory that an engine uses. Short batches keep the inter-token latency low: they need less KV."""
_FLOAT32 = 4
# Memory that the process holds for each byte of small temporary values: malloc keeps what is freed.
_ALLOCATOR_FACTOR: dict[Device, float] = {"cpu": 2.0, "cuda": 1.0}
_MAX_SEQUENCES = 256
MAX_COPIED_BLOCKS = 128
"""What padded decodes on a CPU copy out of the cache at a time, in one layer; at least the blocks of one sequence."""


class OutOfMemory(ValueError):
    """The configured engine needs more memory than the device has. The message says by how much."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that an engine allocates, by purpose."""

    weights: int
    kv_cache: int
    workspace: int
    graphs: int
    runtime: int
    adapters: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.kv_cache + self.workspace + self.graphs + self.runtime


@dataclass(frozen=True)
class Sizing:
    """What an engine can do in a memory budget: the settings of its configuration."""

    kv_tokens: int
    max_sequences: int
    context_tokens: int
    estimate: MemoryEstimate


class MemoryModel:
    """The memory of one model on one device. `graph_bytes`: captured CUDA graphs, if the runner knows them."""

    def __init__(
        self, model: ModelConfig, dtype: str, device: Device = "cpu", *, graph_bytes: int | None = None
    ) -> None:
        self._model = model
        self._value_bytes = DTYPE_BYTES[dtype]
        self._device: Device = device
        self._graph_bytes = GRAPH_BYTES[device] if graph_bytes is None else graph_bytes
        self._q_width = model.heads * model.head_dim
        self._kv_width = model.kv_heads * model.head_dim

    @property
    def weight_bytes(self) -> int:
        """All tensors of the loaded weights.

        On a CPU, norms are part of the matrices that follow them, the norms of heads are repeated for every head, and a
        tied head is a matrix of its own. On a GPU all are as stored.
        """
        model, q, kv, is_cpu = self._model, self._q_width, self._kv_width, self._device == "cpu"
        values = model.hidden * (q + 2 * kv) + q * model.hidden + 3 * model.hidden * model.intermediate
        values += (q + 2 * kv) * model.has_qkv_bias + model.hidden * model.has_out_bias
        values += 0 if is_cpu else 2 * model.hidden + 2 * model.head_dim * model.has_qk_norm
        layer_bytes = values * self._value_bytes + (q + kv) * model.has_qk_norm * _FLOAT32 * is_cpu
        tables = 2 if Task.GENERATE in model.tasks and (is_cpu or not model.is_tied) else 1
        table_bytes = tables * model.vocab_size * model.hidden * self._value_bytes
        norms = 1 + len(model.labels)  # the final norm and a classification head
        norm_bytes = norms * model.hidden * (_FLOAT32 if is_cpu else self._value_bytes)
        return model.layers * layer_bytes + table_bytes + norm_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return self._model.layers * 2 * self._kv_width * self._value_bytes

    def adapter_bytes(self, max_rank: int) -> int:
        """One LoRA adapter that changes every matrix, with the largest rank.

        On a CPU the modules of a joined matrix have their ranks side by side, with zeros between. On a GPU the rank is
        padded to what tensor cores take.
        """
        model, q, kv, is_cpu = self._model, self._q_width, self._kv_width, self._device == "cpu"
        inputs = 3 * model.hidden + q + 2 * model.hidden + model.intermediate
        outputs = (3 if is_cpu else 1) * (q + 2 * kv) + 2 * model.hidden + (4 if is_cpu else 2) * model.intermediate
        rank = max_rank if is_cpu else padded_rank(max_rank)
        return model.layers * rank * (inputs + outputs) * self._value_bytes

    def estimate(self, config: EngineConfig) -> MemoryEstimate:
        """The memory of an engine with this configuration, whose `kv_tokens` is a number."""
        kv_tokens = config.blocks * config.block_tokens
        step = _ALLOCATOR_FACTOR[self._device] * self._step_bytes(config) + self._copied_bytes(config)
        return MemoryEstimate(
            weights=self.weight_bytes,
            kv_cache=kv_tokens * self.kv_token_bytes,
            workspace=int(step + kv_tokens * self._kv_workspace_bytes(config)),
            graphs=self._graph_bytes,
            runtime=RUNTIME_BYTES[self._device],
            adapters=config.max_adapters * self.adapter_bytes(config.max_adapter_rank),
        )

    def kv_tokens(self, config: EngineConfig, budget_bytes: float) -> int:
        """The largest `kv_tokens` within the budget, in whole blocks, and no more than all sequences can use."""
        block = config.block_tokens
        left = budget_bytes - self.estimate(replace(config, kv_tokens=block)).total
        blocks = 1 + int(left / (block * (self.kv_token_bytes + self._kv_workspace_bytes(config))))
        usable = -(-self._context(config) // block) * config.max_sequences
        return max(0, min(blocks, usable)) * block if left >= 0 else 0

    def size(self, config: EngineConfig, budget_bytes: float, call_tokens: int) -> Sizing | None:
        """The largest batch of calls of `call_tokens` tokens that fits, and the context that is left to a call.

        None if the model does not fit with one call.
        """
        sequences = _MAX_SEQUENCES
        while sequences:
            wanted = replace(config, max_sequences=sequences)
            kv_tokens = self.kv_tokens(wanted, budget_bytes)
            if kv_tokens >= sequences * min(call_tokens, self._context(config)) or (sequences == 1 and kv_tokens):
                estimate = self.estimate(replace(wanted, kv_tokens=kv_tokens))
                return Sizing(kv_tokens, sequences, min(self._context(config), kv_tokens), estimate)
            sequences //= 2
        return None

    def _context(self, config: EngineConfig) -> int:
        return min(self._model.context_tokens, config.context_tokens or self._model.context_tokens)

    def _step_bytes(self, config: EngineConfig) -> int:
        """Workspace that does not grow with the KV cache."""
        model, context, sequences = self._model, self._context(config), config.max_sequences
        # Hidden states, two norms, q, k, v, attention's result, gate, up and their product.
        widths = 3 * model.hidden + 2 * (self._q_width + self._kv_width) + 3 * model.intermediate
        rows = (sequences + config.chunk_tokens) * widths * self._value_bytes
        logits = sequences * model.vocab_size
        if self._device == "cuda":
            splits = 4 * sequences * model.heads * (model.head_dim + 1) * _FLOAT32
            rotations = context * model.head_dim * self._value_bytes
            return rows + splits + rotations + logits * (self._value_bytes + DRAWN_LOGIT_BYTES)
        rotations = context * model.head_dim * _FLOAT32
        drawn = min(logits, max(MAX_DRAWN_LOGITS, model.vocab_size)) * DRAWN_LOGIT_BYTES
        # The mask of a chunk at the end of the context is a matrix; padded decodes have a row of one each.
        masks = 2 if model.sliding_layers else 1
        mask = config.chunk_tokens * context * (masks + _FLOAT32)
        if config.pads:
            tiles = 2 * model.kv_heads * 8 / config.block_tokens
            mask = max(mask, int(sequences * context * (masks * (_FLOAT32 + 1) + tiles)))
        return rows + rotations + logits * _FLOAT32 + drawn + mask

    def _copied_bytes(self, config: EngineConfig) -> int:
        """Keys and values of one layer that are copied out of the cache: of one sequence, or of several padded ones."""
        if self._device == "cuda":
            return 0
        tokens = context = self._context(config)
        if config.pads:
            at_once = min(MAX_COPIED_BLOCKS * config.block_tokens, config.max_sequences * context)
            tokens = max(context, at_once)
        return 2 * self._kv_width * tokens * self._value_bytes

    def _kv_workspace_bytes(self, config: EngineConfig) -> float:
        """Workspace per token of the KV cache when it is full of decodes: on a CPU they are computed block by block,
        unless they are padded.
        """
        if self._device == "cuda" or config.pads:
            return 0.0
        per_block = 3 * self._q_width * self._value_bytes + 3 * 8
        masks = 2 if self._model.sliding_layers else 1
        # Scores are there by block and, while they are arranged by row, up to three times more.
        scores = 4 * self._model.heads * _FLOAT32 + masks * (_FLOAT32 + 1)
        # Blocks that lie apart are copied, one layer at a time; at least half of a range lies together.
        return scores + per_block / config.block_tokens + self.kv_token_bytes / self._model.layers / 2


def padded_rank(rank: int) -> int:
    """The rank that adapters have on a GPU: a power of two, and at least what tensor cores multiply at once."""
    return max(16, 1 << (rank - 1).bit_length())


def fitted(memory: MemoryModel, config: EngineConfig, total_bytes: int, available_bytes: int) -> EngineConfig:
    """The configuration with a number for `kv_tokens`. Raises OutOfMemory if it does not fit into available memory."""
    if config.kv_tokens == "auto":
        budget = min(config.memory_share * total_bytes, available_bytes)
        kv_tokens = memory.kv_tokens(config, budget)
        if kv_tokens >= config.block_tokens:
            return replace(config, kv_tokens=kv_tokens)
        config, available_bytes = replace(config, kv_tokens=config.block_tokens), int(budget)
    need = memory.estimate(config)
    if need.total <= available_bytes:
        return config
    fits = memory.kv_tokens(config, available_bytes)
    advice = f"kv_tokens of {fits:,} fit" if fits else "no KV cache fits beside the weights"
    raise OutOfMemory(
        f"kv_tokens {config.kv_tokens:,} need {gib(need.kv_cache)}, weights {gib(need.weights)}, the rest "
        f"{gib(need.total - need.kv_cache - need.weights)}: together {gib(need.total)}, "
        f"{gib(need.total - available_bytes)} more than the {gib(available_bytes)} available; {advice}"
    )


def gib(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB"
