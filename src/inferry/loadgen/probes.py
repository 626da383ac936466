"""The probes of a calibration, in an order in which every prefix of the list leaves a solvable fit.

Single prompts of growing size show prefill, attention and the fixed cost of a request. Sequences that decode together
show the cost of a step; with long contexts, that of reading KV. Prompts sent beside decoding sequences separate engine
time from server time. A repeated prompt shows the cost besides prefill. A burst shows the capacity of the server.
"""

from collections.abc import Iterator
from math import ceil

from msgspec import Struct

from inferry.domain.values import replace
from inferry.sim.observations import Kind

MAX_PROMPT_TOKENS = 16_384
MAX_SEQUENCES = 256
SHORT_PROMPT_TOKENS = 32
MIN_PROMPT_TOKENS = 16
STEADY_TOKENS = 48
SETTLED_TOKENS = 8
INJECTED_OUTPUT = 4
DEFAULT_CHUNK_TOKENS = 2048


class Probe(Struct, frozen=True, kw_only=True):
    """`sequences` calls at once; an `inject` probe then sends prompts of `injected` tokens beside them, one by one."""

    kind: Kind
    sequences: int = 1
    prompt_tokens: int = SHORT_PROMPT_TOKENS
    output_tokens: int = STEADY_TOKENS
    injected: tuple[int, ...] = ()
    held_out: bool = False

    @property
    def description(self) -> str:
        """The name shown while it runs."""
        match self.kind:
            case "prefill":
                return f"a prompt of {self.prompt_tokens:,} tokens"
            case "decode":
                return f"{self.sequences:,} sequences that decode"
            case "context":
                return f"{self.sequences:,} sequences with {self.prompt_tokens:,} tokens of context"
            case "inject":
                return f"{max(self.injected):,} tokens of prompt beside {self.sequences:,} sequences"
            case "hit":
                return f"the same {self.prompt_tokens:,} tokens again"
            case "burst":
                return f"{self.sequences:,} requests at once"

    @property
    def kv_tokens(self) -> int:
        """Peak KV use, in tokens."""
        return self.sequences * (self.prompt_tokens + self.output_tokens) + max(self.injected, default=0)


class ProbeLimits(Struct, frozen=True, kw_only=True):
    """Limits of the probes: prompt length, sequences, KV tokens, and context length."""

    prompt_tokens: int = MAX_PROMPT_TOKENS
    sequences: int = MAX_SEQUENCES
    kv_tokens: int | None = None
    context_tokens: int | None = None
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS


class PaceEstimate:
    """The engine's speed so far, accurate enough to decide whether a probe fits into the remaining time."""

    def __init__(self) -> None:
        self._max_prompt_tokens = 0
        self.prompt_token_s = 0.0
        self._itls: dict[int, float] = {}

    def record_prompt(self, tokens: int, first_s: float) -> None:
        if tokens >= self._max_prompt_tokens:
            self._max_prompt_tokens = tokens
            self.prompt_token_s = first_s / tokens

    def record_itl(self, sequences: int, itl_s: float) -> None:
        self._itls[sequences] = itl_s

    def itl_s(self, sequences: int) -> float:
        """Inter-token latency with this many sequences: that of the nearest number seen, extrapolated linearly."""
        if not self._itls:
            return 0.0
        above = [n for n in self._itls if n >= sequences]
        if above:
            return self._itls[min(above)]
        most = max(self._itls)
        return self._itls[most] * sequences / most

    def expected_s(self, probe: Probe) -> float:
        prompts = probe.sequences * probe.prompt_tokens + sum(probe.injected)
        return prompts * self.prompt_token_s + probe.output_tokens * self.itl_s(probe.sequences)


def warm_up(limits: ProbeLimits) -> Iterator[Probe]:
    """Warm-up probes before measuring; from small to large, so that a slow engine is detected early."""
    yield Probe(kind="prefill", output_tokens=8)
    yield Probe(kind="prefill", prompt_tokens=_part(limits, 64), output_tokens=8)
    yield Probe(kind="decode", sequences=min(4, limits.sequences), output_tokens=16)
    yield Probe(kind="prefill", prompt_tokens=_part(limits, 8), output_tokens=4)
    yield Probe(kind="decode", sequences=min(32, limits.sequences), output_tokens=16)
    yield Probe(kind="prefill", prompt_tokens=_part(limits, 2), output_tokens=4)


def schedule(limits: ProbeLimits) -> Iterator[Probe]:
    """One round of probes. The first part makes the fit solvable, the second is held out, the rest refines both."""
    seen: set[Probe] = set()
    for probe in (*_essential(limits), *_validation(limits), *_finer(limits), *_validation_finer(limits)):
        # Where a limit makes two probes equal, the fit gets it and the held-out set does not.
        same_shape = replace(probe, held_out=False)
        if same_shape not in seen and _is_possible(probe, limits):
            seen.add(same_shape)
            yield probe


def _essential(limits: ProbeLimits) -> Iterator[Probe]:
    yield _prefill(limits, 128)
    yield _prefill(limits, 16)
    yield Probe(kind="decode")
    yield _decode(limits, 16)
    yield _prefill(limits, 4)
    yield _context(limits, 4, 8)
    yield _decode(limits, 64)
    yield _burst(32)
    yield _inject(limits, 4, (32, 16))
    yield Probe(kind="hit", prompt_tokens=_part(limits, 8), output_tokens=4)


def _validation(limits: ProbeLimits) -> Iterator[Probe]:
    yield _held_out(_prefill(limits, 24))
    yield _held_out(_decode(limits, 8))
    yield _held_out(_prefill(limits, 5.5))
    yield _held_out(_burst(48))
    yield _held_out(_context(limits, 6, 12))
    yield _held_out(_inject(limits, 8, (20, 12)))


def _finer(limits: ProbeLimits) -> Iterator[Probe]:
    yield _prefill(limits, 32)
    yield _decode(limits, 4)
    yield _prefill(limits, 8)
    yield _burst(128)
    yield _prefill(limits, 64)
    yield _inject(limits, 16, (8, 8, 64))
    yield _decode(limits, 256)
    yield _prefill(limits, 2)
    yield _context(limits, 16, 8)
    yield _inject(limits, 64, (32, 8, 4))
    yield _context(limits, 64, 16)
    yield Probe(kind="hit", prompt_tokens=_part(limits, 2.2), output_tokens=4)
    yield _prefill(limits, 1)
    yield _burst(256)
    yield _context(limits, 16, 4)
    yield _inject(limits, 4, (1,))


def _validation_finer(limits: ProbeLimits) -> Iterator[Probe]:
    yield _held_out(_decode(limits, 32))
    yield _held_out(_prefill(limits, 2.7))
    yield _held_out(_inject(limits, 24, (12, 5.5)))
    yield _held_out(_burst(96))
    yield _held_out(_context(limits, 12, 6))
    yield _held_out(_decode(limits, 128))


def _prefill(limits: ProbeLimits, divisor: float) -> Probe:
    return Probe(kind="prefill", prompt_tokens=_part(limits, divisor), output_tokens=8)


def _decode(limits: ProbeLimits, sequences: int) -> Probe:
    return Probe(kind="decode", sequences=_capped_sequences(limits, sequences))


def _context(limits: ProbeLimits, sequences: int, divisor: float) -> Probe:
    """Output tokens that let all sequences decode together for a while, although their prefills are staggered."""
    sequences_count, prompt = _capped_sequences(limits, sequences), _part(limits, divisor)
    output = ceil(sequences_count * prompt / limits.chunk_tokens) + STEADY_TOKENS // 2
    return Probe(kind="context", sequences=sequences_count, prompt_tokens=prompt, output_tokens=output)


def _inject(limits: ProbeLimits, sequences: int, divisors: tuple[float, ...]) -> Probe:
    injected = tuple(_part(limits, divisor) for divisor in divisors)
    steps = sum(ceil(tokens / limits.chunk_tokens) + 3 * SETTLED_TOKENS for tokens in injected)
    output = 2 * SETTLED_TOKENS + steps
    return Probe(kind="inject", sequences=_capped_sequences(limits, sequences), output_tokens=output, injected=injected)


def _burst(requests: int) -> Probe:
    """May exceed the number of running sequences: the rest is queued by the engine."""
    return Probe(kind="burst", sequences=requests, output_tokens=1)


def _held_out(probe: Probe) -> Probe:
    return replace(probe, held_out=True)


def _part(limits: ProbeLimits, divisor: float) -> int:
    return max(MIN_PROMPT_TOKENS, int(limits.prompt_tokens / divisor))


def _capped_sequences(limits: ProbeLimits, sequences: int) -> int:
    return max(1, min(sequences, limits.sequences))


def _is_possible(probe: Probe, limits: ProbeLimits) -> bool:
    longest = max(probe.prompt_tokens + probe.output_tokens, max(probe.injected, default=0) + INJECTED_OUTPUT)
    if limits.context_tokens is not None and longest > limits.context_tokens:
        return False
    return limits.kv_tokens is None or probe.kind == "burst" or probe.kv_tokens <= 0.8 * limits.kv_tokens
