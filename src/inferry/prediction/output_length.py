"""How much a job will write.

Three sources, each weighted by what it is worth:

- *History*, per (tenant, template, model), leaning on (tenant, model), leaning on (model). A level with n answers
  counts n / (n + 4), the rest comes from the level below it.
- *The size of the prompt*, as the prior under all history: answers grow with prompts, but slowly.
- *The user's hint*. For each tenant the bias and the spread of its hints are tracked; a hint is corrected by the bias
  and counts by its precision against that of history. A tenant that always writes 4096 is soon not believed.

`expected` is a mean, because packing adds it up over jobs; `low` and `high` are the tenth and ninetieth percentile.
All are capped by what the job may write.

Keys are named by clients: tenants, and the templates of each, are the ones used last. A tenant that makes up templates
forgets its own, not its neighbours'.
"""

from collections import OrderedDict
from math import log
from typing import TypeVar

from inferry.domain.jobs import Estimate, InferenceJob
from inferry.prediction.length_sketch import LengthSketch, bucket_of, tokens_of
from inferry.prediction.values import Accuracy, LengthQuery, Spread

MAX_TENANTS = 512
MAX_TEMPLATES_PER_TENANT = 64
"""Of one tenant. Both bounds full of sketches take about 25 MB."""
MAX_MODELS = 256
SHRINKAGE_COUNT = 4.0
"""A level of history counts as much as what it leans on after this many answers."""
SHORT_OUTPUT_TOKENS = 256

_Key = TypeVar("_Key")
_Z90 = 1.2816
_HINT_RATE = 0.05
_HINT_PRIOR_STD = 1.0
"""Spread (standard deviation of the logarithm) that the hints of an unknown tenant are taken to have."""
_ERROR_RATE = 1 / 500
_PRIOR_HALF_WIDTH = 2.08
"""The prior's percentiles are this far (a factor of eight) from its mean."""


class _HintAccuracy:
    """How a tenant's hints relate to what its jobs wrote: moments of log(written / hinted)."""

    __slots__ = ("bias", "count", "variance")

    def __init__(self) -> None:
        self.count = 0
        self.bias = 0.0
        self.variance = _HINT_PRIOR_STD * _HINT_PRIOR_STD

    def learn(self, hint: int, output_tokens: int) -> None:
        self.count += 1
        rate = max(_HINT_RATE, 1 / (self.count + 1))
        log_error = log(output_tokens / hint) - self.bias
        self.bias += rate * log_error
        self.variance += rate * ((1 - rate) * log_error * log_error - self.variance)

    def spread(self, hint: int) -> Spread:
        center = log(hint) + self.bias
        half_width = _Z90 * self.variance**0.5
        return Spread(center - half_width, center + min(self.variance, 2.0) / 2, center + half_width)


class _TenantHistory:
    __slots__ = ("hints", "models", "templates")

    def __init__(self) -> None:
        self.hints = _HintAccuracy()
        self.models: OrderedDict[str, LengthSketch] = OrderedDict()
        self.templates: OrderedDict[tuple[str, str], LengthSketch] = OrderedDict()


class OutputLengthModel:
    """Predicts output lengths and learns from what was written. One owner; no call waits or looks at a clock."""

    def __init__(self, *, short_output_tokens: int = SHORT_OUTPUT_TOKENS) -> None:
        self.short_output_tokens = short_output_tokens
        self._tenants: OrderedDict[str, _TenantHistory] = OrderedDict()
        self._models: OrderedDict[str, LengthSketch] = OrderedDict()
        self._jobs = 0
        self._abs_log_error = 0.0
        self._coverage = 0.0

    # -- what it says ------------------------------------------------------------------------------------------------

    def predict(self, query: LengthQuery) -> Estimate:
        """The length to expect, with a tenth of jobs below `low` and a tenth above `high`."""
        spread = prior(query.prompt_tokens)
        sketch = self._models.get(query.model)
        if sketch is not None:
            spread = _shrink_towards(sketch, spread)
        tenant = self._tenants.get(query.tenant)
        if tenant is not None:
            sketch = tenant.models.get(query.model)
            if sketch is not None:
                spread = _shrink_towards(sketch, spread)
            if query.template is not None:
                sketch = tenant.templates.get((query.model, query.template))
                if sketch is not None:
                    spread = _shrink_towards(sketch, spread)
        if query.hint:
            hints = _HintAccuracy() if tenant is None else tenant.hints
            half_width = (spread.high - spread.low) / (2 * _Z90)
            # The floor keeps a history of equal answers from shutting out a hint that has been as good.
            own_variance, hinted = max(half_width * half_width, 1e-4), max(hints.variance, 1e-4)
            spread = spread.mixed_with(hints.spread(query.hint), own_variance / (own_variance + hinted))
        budget = max(1, query.token_budget)
        expected = min(budget, tokens_of(spread.mean))
        return Estimate(
            min(expected, tokens_of(spread.low)), expected, max(expected, min(budget, tokens_of(spread.high)))
        )

    def is_short(self, job: InferenceJob) -> bool:
        """Whether the job belongs with the short ones. Means are pulled up by long tails: doubt makes a job long."""
        return job.footprint.output.expected <= self.short_output_tokens

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy(self._jobs, self._abs_log_error, self._coverage)

    def hint_error(self, tenant: str) -> float | None:
        """The spread of the tenant's hints around its own bias, as a standard deviation of logarithms."""
        found = self._tenants.get(tenant)
        return found.hints.variance**0.5 if found is not None and found.hints.count else None

    # -- what it learns ----------------------------------------------------------------------------------------------

    def observe(self, query: LengthQuery, predicted: Estimate, output_tokens: int, *, truncated: bool) -> None:
        """A job has ended of itself, or by its limit (`truncated`). Jobs that failed or were cancelled teach
        nothing."""
        if output_tokens < 1:
            output_tokens = 1
        self._track_error(predicted, output_tokens)
        bucket = bucket_of(output_tokens)
        model = query.model
        models = self._models
        sketch = models.get(model)
        if sketch is None:
            sketch = _add_evicting(models, model, MAX_MODELS)
        else:
            models.move_to_end(model)
        sketch.add(bucket, truncated)
        tenants = self._tenants
        tenant = tenants.get(query.tenant)
        if tenant is None:
            if len(tenants) >= MAX_TENANTS:
                tenants.popitem(last=False)
            tenant = tenants[query.tenant] = _TenantHistory()
        else:
            tenants.move_to_end(query.tenant)
        sketch = tenant.models.get(model)
        if sketch is None:
            sketch = _add_evicting(tenant.models, model, MAX_TEMPLATES_PER_TENANT)
        sketch.add(bucket, truncated)
        if query.template is not None:
            key = (model, query.template)
            sketch = tenant.templates.get(key)
            if sketch is None:
                sketch = _add_evicting(tenant.templates, key, MAX_TEMPLATES_PER_TENANT)
            else:
                tenant.templates.move_to_end(key)
            sketch.add(bucket, truncated)
        # An answer that was cut says only that a lower hint was too low.
        if query.hint and (not truncated or output_tokens > query.hint):
            tenant.hints.learn(query.hint, output_tokens)

    def _track_error(self, predicted: Estimate, output_tokens: int) -> None:
        # Against what was really written, cut or not: that is what the estimate was used for.
        self._jobs += 1
        rate = max(_ERROR_RATE, 1 / self._jobs)
        self._abs_log_error += rate * (abs(log(output_tokens / predicted.expected)) - self._abs_log_error)
        is_covered = predicted.low <= output_tokens <= predicted.high
        self._coverage += rate * (is_covered - self._coverage)


def prior(prompt_tokens: int) -> Spread:
    """What to expect of a job of which only the prompt is known: 256 tokens for 1024, twice that for sixteen times."""
    clamped_tokens = min(65_536, max(16, prompt_tokens))
    mean = log(256) + 0.25 * log(clamped_tokens / 1024)
    return Spread(mean - _PRIOR_HALF_WIDTH, mean, mean + _PRIOR_HALF_WIDTH)


def expected_remaining(output: Estimate, produced: int, token_budget: int) -> int:
    """What a running job is expected to write yet: at least one token, never more than it may.

    A job that has outlived its expectation is likelier to be a long one than about to end: half of what it has
    written, as for a tail that falls with the third power.
    """
    left = max(output.expected - produced, produced // 2 if produced >= output.expected else 0, 1)
    return max(1, min(left, token_budget - produced))


def _shrink_towards(sketch: LengthSketch, prior_spread: Spread) -> Spread:
    own_variance = sketch.spread()
    return (
        prior_spread
        if own_variance is None
        else prior_spread.mixed_with(own_variance, sketch.evidence / (sketch.evidence + SHRINKAGE_COUNT))
    )


def _add_evicting(sketches: OrderedDict[_Key, LengthSketch], key: _Key, limit: int) -> LengthSketch:
    if len(sketches) >= limit:
        sketches.popitem(last=False)
    sketch = sketches[key] = LengthSketch()
    return sketch
