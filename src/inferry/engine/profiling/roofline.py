"""The work of a step from the model's shape, and what a device can do of it at best (roofline model). Pure.

Work is a lower limit: each weight is read once per step, keys and values of all visible tokens are read and those of
computed tokens written, and activations stay on the chip.
"""

from collections.abc import Sequence
from math import ceil, log2

from msgspec import Struct

from inferry.engine.model import ModelConfig

OVERHEAD_SHARE = 0.5
"""A step is overhead-bound if at least this share of it is idle."""
_FIT_PARTS = 16
"""Steps in which a doubling of the batch size is searched for the transition."""


class Piece(Struct, frozen=True):
    """`tokens` tokens of a sequence with `computed` tokens before them; the last one is sampled from or not."""

    computed: int
    tokens: int
    is_sampled: bool = True


class StepWork(Struct, frozen=True):
    """Floating-point operations, and bytes to and from the device's memory."""

    flops: float
    moved_bytes: float


class DevicePeak(Struct, frozen=True):
    """What the device achieves: bytes per second of a large copy (read and written), flop/s of a large product."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: StepWork) -> tuple[float, float]:
        """Least seconds for the bytes, and for the operations."""
        return work.moved_bytes / self.bytes_per_s, work.flops / self.flops_per_s


def step_work(model: ModelConfig, pieces: Sequence[Piece], value_bytes: int) -> StepWork:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = model.hidden * (queries + 2 * keys) + queries * model.hidden + 3 * model.hidden * model.intermediate
    head = model.hidden * model.vocab_size
    rows, sampled = sum(piece.tokens for piece in pieces), sum(piece.is_sampled for piece in pieces)
    full, sliding = model.layers - len(model.sliding_layers), len(model.sliding_layers)
    seen = full * _visible(pieces, None) + sliding * _visible(pieces, model.window)
    read = full * _read(pieces, None) + sliding * _read(pieces, model.window)
    values = model.layers * layer + (head if sampled else 0) + rows * model.hidden
    values += 2 * keys * (read + model.layers * rows)
    return StepWork(2 * rows * model.layers * layer + 2 * sampled * head + 4 * queries * seen, values * value_bytes)


def _visible(pieces: Sequence[Piece], window: int | None) -> int:
    """Pairs of a computed token and a token it sees."""
    return sum(
        min(position + 1, window or position + 1)
        for piece in pieces
        for position in range(piece.computed, piece.computed + piece.tokens)
    )


def _read(pieces: Sequence[Piece], window: int | None) -> int:
    """Tokens whose keys and values are read: those that the piece's tokens see."""
    return sum(
        min(piece.computed + piece.tokens, piece.tokens + window if window else piece.computed + piece.tokens)
        for piece in pieces
    )


def decode_pieces(sequences: int, context_tokens: int) -> list[Piece]:
    """A decode step: each sequence sees `context_tokens` tokens, its new one included."""
    return [Piece(context_tokens - 1, 1)] * sequences


def prefill_pieces(prompts: int, prompt_tokens: int, chunk_tokens: int) -> list[Piece]:
    """A step with whole prompts up to `chunk_tokens`; the last one may be cut."""
    pieces = []
    left = min(prompts * prompt_tokens, chunk_tokens)
    while left:
        tokens = min(left, prompt_tokens)
        pieces.append(Piece(0, tokens, tokens == prompt_tokens))
        left -= tokens
    return pieces


def bound_of(work: StepWork, peak: DevicePeak, idle_share: float) -> str:
    """What limits the step: overhead (the device mostly waits), memory or compute."""
    if idle_share >= OVERHEAD_SHARE:
        return "overhead"
    memory_s, compute_s = peak.seconds(work)
    return "memory" if memory_s >= compute_s else "compute"


def roofline_transition(model: ModelConfig, context_tokens: int, value_bytes: int, peak: DevicePeak) -> int | None:
    """The least batch size at which a decode step needs more time for operations than for bytes.

    None if no batch size does: each sequence reads keys and values for longer than its operations take.
    """
    one, two = (step_work(model, decode_pieces(count, context_tokens), value_bytes) for count in (1, 2))
    (memory_1, compute_1), (memory_2, compute_2) = peak.seconds(one), peak.seconds(two)
    per_sequence = (compute_2 - compute_1) - (memory_2 - memory_1)
    if per_sequence <= 0:
        return None
    return max(1, ceil(1 + (memory_1 - compute_1) / per_sequence))


def product_transition(value_bytes: int, peak: DevicePeak) -> int:
    """The least batch size at which products with weights are compute-bound: two operations per row and weight."""
    return max(1, ceil(value_bytes * peak.flops_per_s / (2 * peak.bytes_per_s)))


def measured_transition(product_s: Sequence[tuple[int, float]]) -> int | None:
    """The batch size at which the time of products, by (batch size, seconds), begins to grow with the batch.

    Memory-bound products take the same time at any batch size, compute-bound ones twice the time for twice the batch:
    the result is where both lines cross that fit the logarithms best. None if the time has not grown by half at the
    largest batch size.
    """
    points = [(log2(batch), log2(seconds)) for batch, seconds in product_s if seconds > 0]
    if len(points) < 2:
        return None
    first, last = points[0][0], points[-1][0]
    crossings = [last - number / _FIT_PARTS for number in range(int((last - first) * _FIT_PARTS) + 1)]

    def error(crossing: float) -> float:
        levels = [time - max(0.0, size - crossing) for size, time in points]
        mean = sum(levels) / len(levels)
        return sum((level - mean) ** 2 for level in levels)

    best = min(crossings, key=error)
    return None if best >= last - 0.5 else ceil(2**best)
