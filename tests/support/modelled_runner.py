"""A runner whose steps take the modelled time of an engine: no arithmetic, virtual time."""

import random
from collections.abc import Sequence

from inferry.domain.sampling import Sampling
from inferry.domain.workers import EngineMode
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.planner import Work
from inferry.sim.costs import CostModel, load_model


class ModelledRunner:
    """Every token is 1. `now` moves by the modelled time of each step."""

    context_tokens = 8_192
    vocab_size = 10
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.now = 0.0

    def execute(self, work: Sequence[Work]) -> list[int]:
        decodes = [piece for piece in work if piece.tokens == 1]
        prompts = [piece for piece in work if piece.tokens > 1]
        self.now += self._costs.decode_s(len(decodes), sum(piece.sequence.computed for piece in decodes))
        if prompts:
            pairs = sum(piece.tokens * (piece.sequence.computed + piece.tokens / 2) for piece in prompts)
            self.now += self._costs.prefill_s(sum(piece.tokens for piece in prompts), pairs)
        return [1] * sum(piece.tokens == piece.sequence.pending for piece in work)


class Measured:
    """Seconds of inter-token latencies, sorted, and output tokens per second."""

    def __init__(self, latencies_s: list[float], tokens_per_s: float) -> None:
        self.latencies_s = sorted(latencies_s)
        self.tokens_per_s = tokens_per_s

    def percentile(self, part: float) -> float:
        return self.latencies_s[min(len(self.latencies_s) - 1, int(part * len(self.latencies_s)))]


def modelled(mode: EngineMode, *, jobs: int, concurrency: int, batch: int = 32, mean_output: float = 128) -> Measured:
    """A closed loop of clients: prompts of 32 to 1,024 tokens, exponential output lengths, an 8B model on an H200."""
    rng = random.Random(7)
    runner = ModelledRunner(load_model().costs)
    config = EngineConfig(
        mode=mode,
        max_sequences=batch,
        kv_tokens=400_000,
        chunk_tokens=2_048,
        block_tokens=16,
        prefix_cache=False,  # all prompts are alike
    )
    core = EngineCore(runner, config, clock=lambda: runner.now)
    lengths = [
        (rng.randint(32, 1_024), max(1, min(1_024, round(rng.expovariate(1 / mean_output))))) for _ in range(jobs)
    ]
    waiting = iter(
        [
            Request(key, [1] * prompt, Sampling(temperature=0.0, max_tokens=output, ignore_eos=True), 1)
            for key, (prompt, output) in enumerate(lengths)
        ]
    )
    for _ in range(concurrency):
        core.add(next(waiting))
    last: dict[int, float] = {}
    latencies_s: list[float] = []
    while core.has_work:
        done = core.step()
        for key, _ in done.tokens:
            if key in last:
                latencies_s.append(runner.now - last[key])
            last[key] = runner.now
        for _ in done.ends:
            if (request := next(waiting, None)) is not None:
                core.add(request)
    return Measured(latencies_s, sum(output for _, output in lengths) / runner.now)
