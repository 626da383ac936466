"""Prediction of prefix-cache hits: the part of a prompt that the engine has computed before.

A prompt is hashed in slices. Each hash includes the one before it, so equal hashes mean equal prefixes. Hashes never
leave the process. The bytes after the last whole slice are kept as they are, within a byte limit.

Engines cache tokens and evict them, so the known prefix is multiplied by a hit ratio per model. It is learned from the
cached tokens that an engine reports for each job. Engines that report none may still count hits: then the totals of the
engine are compared with the totals of known prefixes.
"""

from collections.abc import Sequence
from typing import Final

from inferry.prediction.values import PrefixMatch

SLICE_BYTES: Final = 1024
LONG_SLICE_BYTES: Final = 16_384
SHORT_SLICES_BYTES: Final = 32_768
"""Slices are short up to this offset and long after it. Of a long slice only the last `SLICE_BYTES` are hashed, to
bound the cost of long prompts: prompts with such a long common prefix seldom diverge inside a slice."""
SEARCH_BYTES: Final = 4096
MAX_HASHES: Final = 131_072
MAX_TAIL_BYTES = 32 * 1024 * 1024
MAX_MODELS = 1000
INITIAL_HIT_RATIO: Final = 0.9
LEARNING_RATE: Final = 0.05
TOTALS_DECAY: Final = 0.97
"""Factor for older totals at every new one. With two readings per second the memory is about 15 seconds."""
MIN_KNOWN_TOKENS: Final = 2000
"""Totals below this many known tokens are ignored."""
_PROMPT_FIELDS = (b'"messages"', b'"prompt"')


NO_MATCH: Final = PrefixMatch()
"""A prompt too short to be matched or stored."""


class PrefixHitModel:
    """A bounded set of prefix hashes, salted by tenant and model.

    It has two generations. When the recent one is full, it replaces the old one, and hashes not seen since are dropped.
    """

    def __init__(self, limit: int = MAX_HASHES) -> None:
        self._limit = limit
        self._recent: set[int] = set()
        self._old: set[int] = set()
        self._tails: dict[int, bytes] = {}
        self._tail_bytes = 0
        self._hit_ratios: dict[str, float] = {}
        self._reporting: set[str] = set()
        self._totals: dict[str, tuple[float, float]] = {}

    def match(self, tenant: str, model: str, body: bytes) -> PrefixMatch:
        """Store the prompt's prefixes and return how much of it was known. `body` is the request's body."""
        if len(body) < SLICE_BYTES:
            return NO_MATCH  # most small calls: less than one slice
        start = _prompt_start(body)
        size = len(body) - start
        if size < SLICE_BYTES:
            return NO_MATCH
        salt = hash((tenant, model))
        chain = _chain(salt, body, start)
        known = len(chain)
        recent, old = self._recent, self._old
        if chain[-1] not in recent:  # a recent hash was stored together with all hashes before it
            for depth, key in enumerate(chain):
                if key not in recent and key not in old:
                    known = depth
                    break
            recent.update(chain)
        if len(recent) > self._limit:
            self._old, self._recent = recent, set()
        known_bytes = _slice_bytes(known)
        if known:
            # A conversation grows at its end, inside the slice that was not whole in the call before.
            tail = self._tails.get(chain[known - 1])
            if tail is not None:
                known_bytes += _common_prefix_bytes(tail, body, start + known_bytes)
        self._store_tail(chain[-1], body[start + _slice_bytes(len(chain)) :])
        return PrefixMatch(known_bytes / size, sparse_chain(chain))

    def _store_tail(self, key: int, tail: bytes) -> None:
        tails = self._tails
        self._tail_bytes += len(tail) - len(tails.pop(key, b""))
        tails[key] = tail
        while self._tail_bytes > MAX_TAIL_BYTES:
            self._tail_bytes -= len(tails.pop(next(iter(tails))))

    def expected(self, model: str, known_tokens: int) -> int:
        """The part of `known_tokens` that the engine is expected to find in its cache."""
        return int(known_tokens * self._hit_ratios.get(model, INITIAL_HIT_RATIO))

    def learn(self, model: str, known_tokens: int, cached_tokens: int) -> None:
        """Learn from a job's reported cached tokens. Zeros are ignored until the engine has reported a hit."""
        if cached_tokens > 0 and len(self._reporting) < MAX_MODELS:
            self._reporting.add(model)
        if known_tokens < 1 or model not in self._reporting:
            return
        seen = min(1.0, cached_tokens / known_tokens)
        hit_ratio = self._hit_ratios.get(model)
        if hit_ratio is not None or len(self._hit_ratios) < MAX_MODELS:
            hit_ratio = INITIAL_HIT_RATIO if hit_ratio is None else hit_ratio
            self._hit_ratios[model] = hit_ratio + LEARNING_RATE * (seen - hit_ratio)

    def learn_totals(self, model: str, known_tokens: int, found_tokens: int) -> None:
        """Learn from an engine's own count: `found_tokens` hits since the last reading, of `known_tokens` expected."""
        if model in self._reporting or (model not in self._totals and len(self._totals) >= MAX_MODELS):
            return
        known, found = self._totals.get(model, (0.0, 0.0))
        known, found = known * TOTALS_DECAY + known_tokens, found * TOTALS_DECAY + found_tokens
        self._totals[model] = known, found
        if known >= MIN_KNOWN_TOKENS:
            self._hit_ratios[model] = min(1.0, found / known)


def _prompt_start(body: bytes) -> int:
    """The offset of the prompt's field. Fields before it may differ between calls with the same prompt.

    Only the first `SEARCH_BYTES` are searched: a full search of a long body takes as long as decoding it.
    """
    found = [at for at in (body.find(name, 0, SEARCH_BYTES) for name in _PROMPT_FIELDS) if at >= 0]
    return min(found, default=0)


def _chain(salt: int, body: bytes, start: int) -> list[int]:
    """One hash per whole slice, chained to the hashes before it."""
    chain = []
    end = len(body)
    border = min(end, start + SHORT_SLICES_BYTES)
    key = salt
    for at in range(start + SLICE_BYTES, border + 1, SLICE_BYTES):
        key = hash((key, body[at - SLICE_BYTES : at]))
        chain.append(key)
    if border < end:
        for at in range(border + LONG_SLICE_BYTES, end + 1, LONG_SLICE_BYTES):
            key = hash((key, body[at - SLICE_BYTES : at]))
            chain.append(key)
    return chain


def _common_prefix_bytes(tail: bytes, body: bytes, at: int) -> int:
    """The length of the common prefix of `tail` and `body[at:]`."""
    least, most = 0, min(len(tail), len(body) - at)
    if body.startswith(tail, at):
        return most  # a continued conversation
    while least < most:
        middle = (least + most + 1) // 2
        if body[at + least : at + middle] == tail[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _slice_bytes(slices: int) -> int:
    short = SHORT_SLICES_BYTES // SLICE_BYTES
    return min(slices, short) * SLICE_BYTES + max(0, slices - short) * LONG_SLICE_BYTES


def sparse_chain(chain: Sequence[int]) -> tuple[str, ...]:
    """The hashes at depths 1, 2, 4, 8, … and the last: enough to find the worker with the longest prefix."""
    sparse = []
    depth = 1
    while depth <= len(chain):
        sparse.append(chain[depth - 1])
        depth *= 2
    if chain and depth // 2 != len(chain):
        sparse.append(chain[-1])
    return tuple([f"{key:x}" for key in sparse])
