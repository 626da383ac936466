"""Token counts that are only known afterwards, learned from what engines report.

How many tokens a prompt has, where no tokenizer is at hand: bytes times a ratio. How many of them the engine will find
in its prefix cache: a share, for calls that begin a run and for those that go on with one.
"""

from collections import OrderedDict

from inferry.domain.jobs import Estimate

FIRST_GUESS = 0.25
"""Tokens a byte before anything was reported: English text in common vocabularies."""
TEMPLATE_ALLOWANCE = 64
"""Tokens a chat template may add to what the client sent."""
LEARNING_RATE = 0.05
MOST_KEYS = 10_000
MOST_RUNS = 50_000
"""Tenants, templates and runs are named by clients: what is remembered of them is bounded."""


class TokenRatios:
    """Tokens per byte of body for each (model, template), as an average that follows what is reported."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str | None], float] = {}

    def estimate(self, model: str, template: str | None, size: int) -> Estimate:
        ratio = self._ratios.get((model, template)) or self._ratios.get((model, None)) or FIRST_GUESS
        expected = max(1, round(size * ratio))
        # Below there is no floor worth the name: a long run of spaces can be one token. Above, a token is a byte
        # or more of what was sent.
        return Estimate(1, expected, max(expected, size + TEMPLATE_ALLOWANCE))

    def learn(self, model: str, template: str | None, size: int, tokens: int) -> None:
        if size <= 0 or tokens <= 0:
            return
        seen = tokens / size
        for key in {(model, template), (model, None)}:
            ratio = self._ratios.get(key)
            if ratio is None and len(self._ratios) >= MOST_KEYS:
                continue
            self._ratios[key] = seen if ratio is None else ratio + LEARNING_RATE * (seen - ratio)


class CachedShares:
    """The part of a prompt that engines found cached, per model and tenant, for first and for later calls of a run.

    An engine that does not report cached tokens teaches a share of zero, and then whole prompts count.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[str, str, bool], float] = {}
        self._runs: OrderedDict[tuple[str, str], None] = OrderedDict()

    def estimate(self, model: str, tenant: str, run_id: str, prompt: Estimate) -> Estimate:
        share = self._shares.get((model, tenant, (tenant, run_id) in self._runs), 0.0)
        return Estimate(0, int(prompt.expected * share), prompt.high)

    def learn(self, model: str, tenant: str, run_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        if prompt_tokens <= 0:
            return
        run = (tenant, run_id)
        goes_on = run in self._runs
        self._runs[run] = None
        self._runs.move_to_end(run)
        if len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)
        key = (model, tenant, goes_on)
        seen = min(1.0, cached_tokens / prompt_tokens)
        share = self._shares.get(key)
        if share is not None:
            self._shares[key] = share + LEARNING_RATE * (seen - share)
        elif len(self._shares) < MOST_KEYS:
            self._shares[key] = seen
