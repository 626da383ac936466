"""Beginnings of prompts that came before: what an engine with a prefix cache will not compute again.

A prompt is hashed in slices, each hash chained to the one before, so that equal hashes mean equal beginnings. Only the
process itself uses them. What is left behind the last whole slice is remembered as it is, for a while. Engines cache
tokens and not bytes, and forget: what they report as cached corrects what is expected of the next prompt. Some report
it for every job. Those that do not may still count it for themselves, and what they found in all is compared with what
all prompts together had in common with earlier ones.
"""

from collections.abc import Sequence

from inferry.dispatch.values import Beginning

SLICE_BYTES = 1024
LONG_SLICE_BYTES = 16_384
SHORT_PART_BYTES = 32_768
"""Slices are short where most prompts end and long behind that, where only the end of each is looked at: a long prompt
must not cost much, and prompts that begin alike for so long go on alike, or end."""
LOOKED_AT_BYTES = 4096
MOST_REMEMBERED = 131_072
MOST_TAIL_BYTES = 32 * 1024 * 1024
MOST_MODELS = 1000
FIRST_TRUST = 0.9
LEARNING_RATE = 0.05
TOTALS_KEPT = 0.97
"""How much older totals count with every new one: with two readings a second, some fifteen seconds are remembered."""
LEAST_KNOWN_TOKENS = 2000
"""Totals say nothing while fewer tokens than this should have been found."""
_STARTS = (b'"messages"', b'"prompt"')


NEW = Beginning()
"""A prompt of which nothing was known and nothing is remembered."""


class PrefixMemory:
    """A bounded memory of beginnings, per tenant and model.

    Two generations: when the young one is full it becomes the old one, and what was in the old one and not seen since
    is forgotten.
    """

    def __init__(self, limit: int = MOST_REMEMBERED) -> None:
        self._limit = limit
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._tails: dict[int, bytes] = {}
        self._tail_bytes = 0
        self._trust: dict[str, float] = {}
        self._reporting: set[str] = set()
        self._totals: dict[str, tuple[float, float]] = {}

    def meet(self, tenant: str, model: str, body: bytes) -> Beginning:
        """Remember a prompt, and say how much of it was known. `body` is the request it came in."""
        if len(body) < SLICE_BYTES:
            return NEW  # most small calls: not one whole slice
        start = _start(body)
        size = len(body) - start
        if size < SLICE_BYTES:
            return NEW
        salt = hash((tenant, model))
        chain = _chain(salt, body, start)
        known = len(chain)
        young, old = self._young, self._old
        if chain[-1] not in young:  # whatever is young was remembered together with all that comes before it
            for depth, key in enumerate(chain):
                if key not in young and key not in old:
                    known = depth
                    break
            young.update(chain)
        if len(young) > self._limit:
            self._old, self._young = young, set()
        known_bytes = _bytes_in(known)
        if known:
            # Conversations grow at their end, which is where the last one's last slice was not whole.
            tail = self._tails.get(chain[known - 1])
            if tail is not None:
                known_bytes += _in_common(tail, body, start + known_bytes)
        self._remember_tail(chain[-1], body[start + _bytes_in(len(chain)) :])
        return Beginning(known_bytes / size, _thinned(chain))

    def _remember_tail(self, key: int, tail: bytes) -> None:
        tails = self._tails
        self._tail_bytes += len(tail) - len(tails.pop(key, b""))
        tails[key] = tail
        while self._tail_bytes > MOST_TAIL_BYTES:
            self._tail_bytes -= len(tails.pop(next(iter(tails))))

    def expected(self, model: str, known_tokens: int) -> int:
        """Of the tokens of a prompt that came before, those that the engine will find in its cache."""
        return int(known_tokens * self._trust.get(model, FIRST_TRUST))

    def learn(self, model: str, known_tokens: int, cached_tokens: int) -> None:
        """What the engine reported of a job. One that has never reported anything says nothing by reporting nothing."""
        if cached_tokens > 0 and len(self._reporting) < MOST_MODELS:
            self._reporting.add(model)
        if known_tokens < 1 or model not in self._reporting:
            return
        seen = min(1.0, cached_tokens / known_tokens)
        trust = self._trust.get(model)
        if trust is not None or len(self._trust) < MOST_MODELS:
            trust = FIRST_TRUST if trust is None else trust
            self._trust[model] = trust + LEARNING_RATE * (seen - trust)

    def learn_totals(self, model: str, known_tokens: int, found_tokens: int) -> None:
        """What the engine found in its cache since it was last asked, of prompts with so much known from before."""
        if model in self._reporting or (model not in self._totals and len(self._totals) >= MOST_MODELS):
            return
        known, found = self._totals.get(model, (0.0, 0.0))
        known, found = known * TOTALS_KEPT + known_tokens, found * TOTALS_KEPT + found_tokens
        self._totals[model] = known, found
        if known >= LEAST_KNOWN_TOKENS:
            self._trust[model] = min(1.0, found / known)


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
    key = salt
    for at in range(start + SLICE_BYTES, border + 1, SLICE_BYTES):
        key = hash((key, body[at - SLICE_BYTES : at]))
        chain.append(key)
    if border < end:
        for at in range(border + LONG_SLICE_BYTES, end + 1, LONG_SLICE_BYTES):
            key = hash((key, body[at - SLICE_BYTES : at]))
            chain.append(key)
    return chain


def _in_common(tail: bytes, body: bytes, at: int) -> int:
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
