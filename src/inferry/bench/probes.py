"""Which probes tell what an engine costs, in an order in which a cut at any place leaves a fit that can be solved.

Single prompts of growing size tell prefill, attention and what a request costs at all; sequences that decode together
tell a step; the same with long contexts tell what reading KV costs; prompts sent into a crowd that decodes tell engine
time from server time; the same prompt again tells what of a prompt is not prefill; a burst tells what the server can
take in.
"""

from collections.abc import Iterator
from math import ceil

from msgspec import Struct

from inferry.domain.values import replace
from inferry.sim.observations import Kind

LARGEST_PROMPT = 16_384
MOST_SEQUENCES = 256
SHORT_PROMPT = 32
LEAST_PROMPT = 16
STEADY_TOKENS = 48
SETTLED_TOKENS = 8
INJECTED_OUTPUT = 4
ASSUMED_CHUNK = 2048


class Probe(Struct, frozen=True, kw_only=True):
    """`sequences` calls at once; into those of an `inject` probe, prompts of `injected` tokens one after the other."""

    kind: Kind
    sequences: int = 1
    prompt_tokens: int = SHORT_PROMPT
    output_tokens: int = STEADY_TOKENS
    injected: tuple[int, ...] = ()
    held_out: bool = False

    @property
    def words(self) -> str:
        """What a person reads while it runs."""
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
        """KV that it needs at its peak."""
        return self.sequences * (self.prompt_tokens + self.output_tokens) + max(self.injected, default=0)


class Reach(Struct, frozen=True, kw_only=True):
    """How far the probes may go: the longest prompt, the most sequences, the KV there is, and a sequence's context."""

    prompt_tokens: int = LARGEST_PROMPT
    sequences: int = MOST_SEQUENCES
    kv_tokens: int | None = None
    context_tokens: int | None = None
    chunk_tokens: int = ASSUMED_CHUNK


class Pace:
    """How fast the engine was so far: good enough to tell whether a probe is worth beginning."""

    def __init__(self) -> None:
        self._largest_prompt = 0
        self.prompt_token_s = 0.0
        self._gaps: dict[int, float] = {}

    def saw_prompt(self, tokens: int, first_s: float) -> None:
        if tokens >= self._largest_prompt:
            self._largest_prompt = tokens
            self.prompt_token_s = first_s / tokens

    def saw_gap(self, sequences: int, gap_s: float) -> None:
        self._gaps[sequences] = gap_s

    def gap_s(self, sequences: int) -> float:
        """Between tokens of that many sequences: of the nearest number seen, and in proportion beyond it."""
        if not self._gaps:
            return 0.0
        above = [n for n in self._gaps if n >= sequences]
        if above:
            return self._gaps[min(above)]
        most = max(self._gaps)
        return self._gaps[most] * sequences / most

    def expected_s(self, probe: Probe) -> float:
        prompts = probe.sequences * probe.prompt_tokens + sum(probe.injected)
        return prompts * self.prompt_token_s + probe.output_tokens * self.gap_s(probe.sequences)


def warm_up(reach: Reach) -> Iterator[Probe]:
    """What the engine must have done once before it is measured; from small to large, so that a slow one is noticed."""
    yield Probe(kind="prefill", output_tokens=8)
    yield Probe(kind="prefill", prompt_tokens=_part(reach, 64), output_tokens=8)
    yield Probe(kind="decode", sequences=min(4, reach.sequences), output_tokens=16)
    yield Probe(kind="prefill", prompt_tokens=_part(reach, 8), output_tokens=4)
    yield Probe(kind="decode", sequences=min(32, reach.sequences), output_tokens=16)
    yield Probe(kind="prefill", prompt_tokens=_part(reach, 2), output_tokens=4)


def schedule(reach: Reach) -> Iterator[Probe]:
    """One round of probes. Its first part makes the fit solvable, the second judges it, the rest sharpens both."""
    seen: set[Probe] = set()
    for probe in (*_essential(reach), *_judging(reach), *_finer(reach), *_judging_finer(reach)):
        # Where a limit makes two probes the same, the fit has it and not the judge.
        alike = replace(probe, held_out=False)
        if alike not in seen and _is_possible(probe, reach):
            seen.add(alike)
            yield probe


def _essential(reach: Reach) -> Iterator[Probe]:
    yield _prefill(reach, 128)
    yield _prefill(reach, 16)
    yield Probe(kind="decode")
    yield _decode(reach, 16)
    yield _prefill(reach, 4)
    yield _context(reach, 4, 8)
    yield _decode(reach, 64)
    yield _burst(32)
    yield _inject(reach, 4, (32, 16))
    yield Probe(kind="hit", prompt_tokens=_part(reach, 8), output_tokens=4)


def _judging(reach: Reach) -> Iterator[Probe]:
    yield _held_out(_prefill(reach, 24))
    yield _held_out(_decode(reach, 8))
    yield _held_out(_prefill(reach, 5.5))
    yield _held_out(_burst(48))
    yield _held_out(_context(reach, 6, 12))
    yield _held_out(_inject(reach, 8, (20, 12)))


def _finer(reach: Reach) -> Iterator[Probe]:
    yield _prefill(reach, 32)
    yield _decode(reach, 4)
    yield _prefill(reach, 8)
    yield _burst(128)
    yield _prefill(reach, 64)
    yield _inject(reach, 16, (8, 8, 64))
    yield _decode(reach, 256)
    yield _prefill(reach, 2)
    yield _context(reach, 16, 8)
    yield _inject(reach, 64, (32, 8, 4))
    yield _context(reach, 64, 16)
    yield Probe(kind="hit", prompt_tokens=_part(reach, 2.2), output_tokens=4)
    yield _prefill(reach, 1)
    yield _burst(256)
    yield _context(reach, 16, 4)
    yield _inject(reach, 4, (1,))


def _judging_finer(reach: Reach) -> Iterator[Probe]:
    yield _held_out(_decode(reach, 32))
    yield _held_out(_prefill(reach, 2.7))
    yield _held_out(_inject(reach, 24, (12, 5.5)))
    yield _held_out(_burst(96))
    yield _held_out(_context(reach, 12, 6))
    yield _held_out(_decode(reach, 128))


def _prefill(reach: Reach, divisor: float) -> Probe:
    return Probe(kind="prefill", prompt_tokens=_part(reach, divisor), output_tokens=8)


def _decode(reach: Reach, sequences: int) -> Probe:
    return Probe(kind="decode", sequences=_crowd(reach, sequences))


def _context(reach: Reach, sequences: int, divisor: float) -> Probe:
    """Long enough that all decode together for a while: the first begin while the last are still computed."""
    crowd, prompt = _crowd(reach, sequences), _part(reach, divisor)
    output = ceil(crowd * prompt / reach.chunk_tokens) + STEADY_TOKENS // 2
    return Probe(kind="context", sequences=crowd, prompt_tokens=prompt, output_tokens=output)


def _inject(reach: Reach, sequences: int, divisors: tuple[float, ...]) -> Probe:
    injected = tuple(_part(reach, divisor) for divisor in divisors)
    steps = sum(ceil(tokens / reach.chunk_tokens) + 3 * SETTLED_TOKENS for tokens in injected)
    output = 2 * SETTLED_TOKENS + steps
    return Probe(kind="inject", sequences=_crowd(reach, sequences), output_tokens=output, injected=injected)


def _burst(requests: int) -> Probe:
    """More than may run at once is no harm here: the rest queues."""
    return Probe(kind="burst", sequences=requests, output_tokens=1)


def _held_out(probe: Probe) -> Probe:
    return replace(probe, held_out=True)


def _part(reach: Reach, divisor: float) -> int:
    return max(LEAST_PROMPT, int(reach.prompt_tokens / divisor))


def _crowd(reach: Reach, sequences: int) -> int:
    return max(1, min(sequences, reach.sequences))


def _is_possible(probe: Probe, reach: Reach) -> bool:
    longest = max(probe.prompt_tokens + probe.output_tokens, max(probe.injected, default=0) + INJECTED_OUTPUT)
    if reach.context_tokens is not None and longest > reach.context_tokens:
        return False
    return reach.kv_tokens is None or probe.kind == "burst" or probe.kv_tokens <= 0.8 * reach.kv_tokens
