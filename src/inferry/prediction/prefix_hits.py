"""Beginnings of prompts that came before: what an engine with a prefix cache will not compute again.

A prompt is hashed in slices, each hash chained to the one before, so that equal hashes mean equal beginnings. Only the
process itself uses them. What is left behind the last whole slice is remembered as it is, for a while. Engines cache
tokens and not bytes, and forget: what they report as cached corrects what is expected of the next prompt. Some report
it for every job. Those that do not may still count it for themselves, and what they found in all is compared with what
all prompts together had in common with earlier ones.
"""

from collections.abc import Sequence

from inferry.prediction.values import PrefixMatch

SLICE_BYTES = 1024
LONG_SLICE_BYTES = 16_384
SHORT_SLICES_BYTES = 32_768
"""Slices are short where most prompts end and long behind that, where only the end of each is looked at: a long prompt
must not cost much, and prompts that begin alike for so long go on alike, or end."""
SEARCH_BYTES = 4096
MAX_HASHES = 131_072
MAX_TAIL_BYTES = 32 * 1024 * 1024
MAX_MODELS = 1000
INITIAL_HIT_RATIO = 0.9
LEARNING_RATE = 0.05
TOTALS_DECAY = 0.97
"""How much older totals count with every new one: with two readings a second, some fifteen seconds are remembered."""
MIN_KNOWN_TOKENS = 2000
"""Totals say nothing while fewer tokens than this should have been found."""
_PROMPT_FIELDS = (b'"messages"', b'"prompt"')


NO_MATCH = PrefixMatch()
"""A prompt of which nothing was known and nothing is remembered."""


class PrefixHitModel:
    """A bounded memory of beginnings, per tenant and model.

    Two generations: when the young one is full it becomes the old one, and what was in the old one and not seen since
    is forgotten.
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
        """Remember a prompt, and say how much of it was known. `body` is the request it came in."""
        if len(body) < SLICE_BYTES:
            return NO_MATCH  # most small calls: not one whole slice
        start = _prompt_start(body)
        size = len(body) - start
        if size < SLICE_BYTES:
            return NO_MATCH
        salt = hash((tenant, model))
        chain = _chain(salt, body, start)
        known = len(chain)
        recent, old = self._recent, self._old
        if chain[-1] not in recent:  # whatever is young was remembered together with all that comes before it
            for depth, key in enumerate(chain):
                if key not in recent and key not in old:
                    known = depth
                    break
            recent.update(chain)
        if len(recent) > self._limit:
            self._old, self._recent = recent, set()
        known_bytes = _slice_bytes(known)
        if known:
            # Conversations grow at their end, which is where the last one's last slice was not whole.
            tail = self._tails.get(chain[known - 1])
            if tail is not None:
                known_bytes += _common_prefix_bytes(tail, body, start + known_bytes)
        self._store_tail(chain[-1], body[start + _slice_bytes(len(chain)) :])
        return PrefixMatch(known_bytes / size, _sparse_chain(chain))

    def _store_tail(self, key: int, tail: bytes) -> None:
        tails = self._tails
        self._tail_bytes += len(tail) - len(tails.pop(key, b""))
        tails[key] = tail
        while self._tail_bytes > MAX_TAIL_BYTES:
            self._tail_bytes -= len(tails.pop(next(iter(tails))))

    def expected(self, model: str, known_tokens: int) -> int:
        """Of the tokens of a prompt that came before, those that the engine will find in its cache."""
        return int(known_tokens * self._hit_ratios.get(model, INITIAL_HIT_RATIO))

    def learn(self, model: str, known_tokens: int, cached_tokens: int) -> None:
        """What the engine reported of a job. One that has never reported anything says nothing by reporting nothing."""
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
        """What the engine found in its cache since it was last asked, of prompts with so much known from before."""
        if model in self._reporting or (model not in self._totals and len(self._totals) >= MAX_MODELS):
            return
        known, found = self._totals.get(model, (0.0, 0.0))
        known, found = known * TOTALS_DECAY + known_tokens, found * TOTALS_DECAY + found_tokens
        self._totals[model] = known, found
        if known >= MIN_KNOWN_TOKENS:
            self._hit_ratios[model] = min(1.0, found / known)


def _prompt_start(body: bytes) -> int:
    """Where the prompt begins. What clients write before it may differ from call to call and says nothing.

    Looked for near the beginning only: to search a long body for a name that is not there takes as long as decoding it.
    """
    found = [at for at in (body.find(name, 0, SEARCH_BYTES) for name in _PROMPT_FIELDS) if at >= 0]
    return min(found, default=0)


def _chain(salt: int, body: bytes, start: int) -> list[int]:
    """One hash per whole slice, each of everything up to its end."""
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
    """How many bytes of the body from there are those of the tail."""
    least, most = 0, min(len(tail), len(body) - at)
    if body.startswith(tail, at):
        return most  # a conversation that went on
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


def _sparse_chain(chain: Sequence[int]) -> tuple[str, ...]:
    """Every second hash twice as far as the one before, and the last: enough to tell which worker has most of it."""
    sparse = []
    depth = 1
    while depth <= len(chain):
        sparse.append(chain[depth - 1])
        depth *= 2
    if chain and depth // 2 != len(chain):
        sparse.append(chain[-1])
    return tuple([f"{key:x}" for key in sparse])
