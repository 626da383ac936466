"""Beginnings of prompts that came before: what an engine with a prefix cache will not compute again.

A prompt is hashed in slices, each hash chained to the one before, so that equal hashes mean equal beginnings. Only the
process itself uses them. Engines cache tokens and not bytes, and forget: what they report as cached corrects what is
expected of the next prompt.
"""

from collections.abc import Sequence

from msgspec import Struct

SLICE_BYTES = 1024
LONG_SLICE_BYTES = 16_384
SHORT_PART_BYTES = 32_768
"""Slices are short where most prompts end and long behind that, where only the end of each is looked at: a long prompt
must not cost much, and prompts that begin alike for so long go on alike, or end."""
LOOKED_AT_BYTES = 4096
MOST_REMEMBERED = 131_072
MOST_MODELS = 1000
FIRST_TRUST = 0.9
LEARNING_RATE = 0.05
_STARTS = (b'"messages"', b'"prompt"')


class Beginning(Struct, frozen=True, gc=False):
    """How much of a prompt came before, as a part of it; and its chain, thinned out: short beginnings, then longer."""

    share: float = 0.0
    chain: tuple[str, ...] = ()


_NEW = Beginning()


class PrefixMemory:
    """A bounded memory of beginnings, per tenant and model.

    Two generations: when the young one is full it becomes the old one, and what was in the old one and not seen since
    is forgotten.
    """

    def __init__(self, limit: int = MOST_REMEMBERED) -> None:
        self._limit = limit
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._trust: dict[str, float] = {}

    def meet(self, tenant: str, model: str, body: bytes) -> Beginning:
        """Remember a prompt, and say how much of it was known. `body` is the request it came in."""
        start = _start(body)
        size = len(body) - start
        if size < SLICE_BYTES:
            return _NEW  # most small calls: not one whole slice
        chain = _chain(hash((tenant, model)), body, start)
        known = 0
        young, old = self._young, self._old
        for depth, key in enumerate(chain):
            if key not in young:
                if key not in old:
                    young.update(chain[depth:])
                    break
                young.add(key)
            known = depth + 1
        if len(young) > self._limit:
            self._old, self._young = young, set()
        return Beginning(_bytes_in(known) / size if size else 0.0, _thinned(chain))

    def expected(self, model: str, known_tokens: int) -> int:
        """Of the tokens of a prompt that came before, those that the engine will find in its cache."""
        return int(known_tokens * self._trust.get(model, FIRST_TRUST))

    def learn(self, model: str, known_tokens: int, cached_tokens: int) -> None:
        """What the engine reported. One that reports nothing as cached soon counts whole prompts."""
        if known_tokens < 1:
            return
        seen = min(1.0, cached_tokens / known_tokens)
        trust = self._trust.get(model)
        if trust is not None or len(self._trust) < MOST_MODELS:
            trust = FIRST_TRUST if trust is None else trust
            self._trust[model] = trust + LEARNING_RATE * (seen - trust)


def _start(body: bytes) -> int:
    """Where the prompt begins. What clients write before it may differ from call to call and says nothing.

    Looked for near the beginning only: to search a long body for a name that is not there takes as long as decoding it.
    """
    found = [at for at in (body.find(name, 0, LOOKED_AT_BYTES) for name in _STARTS) if at >= 0]
    return min(found, default=0)


def _chain(salt: int, body: bytes, start: int) -> list[int]:
    """One hash per whole slice, each of everything up to its end."""
    chain = []
    end = len(body)
    border = min(end, start + SHORT_PART_BYTES)
    view = memoryview(body)
    key = salt
    at = start
    while at + SLICE_BYTES <= border:
        key = hash((key, hash(view[at : at + SLICE_BYTES])))
        chain.append(key)
        at += SLICE_BYTES
    if border < end:
        while at + LONG_SLICE_BYTES <= end:
            at += LONG_SLICE_BYTES
            key = hash((key, hash(view[at - SLICE_BYTES : at])))
            chain.append(key)
    return chain


def _bytes_in(slices: int) -> int:
    short = SHORT_PART_BYTES // SLICE_BYTES
    return min(slices, short) * SLICE_BYTES + max(0, slices - short) * LONG_SLICE_BYTES


def _thinned(chain: Sequence[int]) -> tuple[str, ...]:
    """Every second hash twice as far as the one before, and the last: enough to tell which worker has most of it."""
    thin = []
    depth = 1
    while depth <= len(chain):
        thin.append(chain[depth - 1])
        depth *= 2
    if chain and depth // 2 != len(chain):
        thin.append(chain[-1])
    return tuple([f"{key:x}" for key in thin])
