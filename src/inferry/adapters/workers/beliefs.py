"""What is believed of an engine from one reading of its metrics to the next. Pure: time is an argument."""

import math
from collections import deque

from inferry.adapters.workers.readings import Reading
from inferry.adapters.workers.values import EngineSteps
from inferry.domain.workers import EngineCounts, Load

LOOKS = 4
"""Use counts as somebody else's when it was there in so many readings in a row: calls that begin or end between two
counts are gone in the next."""
TOLERATED = 2
TOLERATED_PART = 0.05
STALE_S = 3.0
"""A reading older than this says nothing about now."""
CROWDED = 6
"""So many readings in a row with calls waiting, cache to spare and the same number running show how many sequences an
engine runs at most. A number that changes shows nothing: calls wait inside for their prompts too."""
SPARE = 0.9


class Beliefs:
    """Fed with readings; answers what the load is, whose it is, and what the engine has done."""

    def __init__(self) -> None:
        self.reading: Reading | None = None
        self.read_at = -math.inf
        self.steps = EngineSteps()
        self.prefix_hits_part: float | None = None
        self.preemptions = 0
        self.engine_sequences: int | None = None
        self._excess: deque[Load] = deque(maxlen=LOOKS)
        self._crowded: list[int] = []

    def learn(self, reading: Reading, own: int, now: float) -> None:
        """`own` calls at most were this gateway's."""
        last, seconds = self.reading, now - self.read_at
        self.reading, self.read_at = reading, now
        self._excess.append(excess(reading, own))
        self._notice_the_limit(reading)
        if last is None:
            return
        self.preemptions += max(0, int(reading.preemptions - last.preemptions))
        queries = reading.prefix_queries - last.prefix_queries
        if queries > 0:
            self.prefix_hits_part = max(0.0, min(1.0, (reading.prefix_hits - last.prefix_hits) / queries))
        if reading.steps is not None and last.steps is not None:
            count, tokens = reading.steps.count - last.steps.count, reading.steps.tokens - last.steps.tokens
            if count >= 0 and seconds > 0:  # else the engine started again
                self.steps = EngineSteps(count / seconds, tokens / count if count else 0.0)

    def load(self, own: int, now: float) -> Load:
        """What the engine does, whoever sent it; what this gateway knows of its own calls where it does not say."""
        if self.reading is None or now - self.read_at > STALE_S:
            return Load(running=own)
        return Load(self.reading.running, self.reading.waiting, self.reading.kv_tokens)

    @property
    def counts(self) -> EngineCounts | None:
        """What the engine has done since it started, where it says all of it."""
        reading = self.reading
        if reading is None or reading.steps is None or reading.output_tokens is None:
            return None
        written = int(reading.output_tokens)
        return EngineCounts(int(reading.steps.count), max(0, int(reading.steps.tokens) - written), written)

    def foreign(self, now: float) -> Load:
        """What others have there, as far as it was there in every one of the last few readings."""
        if len(self._excess) < LOOKS or now - self.read_at > STALE_S * LOOKS:
            return Load()
        return Load(
            min(one.running for one in self._excess),
            min(one.waiting for one in self._excess),
            min(one.kv_tokens for one in self._excess),
        )

    def _notice_the_limit(self, reading: Reading) -> None:
        if reading.waiting and reading.running and (reading.kv_usage is None or reading.kv_usage < SPARE):
            self._crowded.append(reading.running)
            if self._crowded[0] != reading.running:
                self._crowded = [reading.running]  # it runs as many as the moment lets it
            elif len(self._crowded) >= CROWDED:
                self.engine_sequences = reading.running
        else:
            self._crowded.clear()


def excess(reading: Reading, own: int) -> Load:
    """What runs and waits beyond this gateway's own calls, unless it is so little that it may be a race."""
    beyond = reading.sequences - own
    if beyond <= TOLERATED + TOLERATED_PART * own:
        return Load()
    running = min(beyond, max(0, reading.running - own))
    kv_tokens = reading.kv_tokens * running // reading.running if reading.running else 0
    return Load(running, beyond - running, kv_tokens)
