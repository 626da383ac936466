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

from inferry.admission.sketch import LengthSketch, bucket_of, tokens_of
from inferry.admission.values import Accuracy, Question, Spread
from inferry.domain.jobs import Estimate, InferenceJob

MOST_TENANTS = 512
MOST_TEMPLATES = 64
"""Of one tenant. Both bounds full of sketches take about 25 MB."""
MOST_MODELS = 256
LEANING = 4.0
"""A level of history counts as much as what it leans on after this many answers."""
SHORT_TOKENS = 256

_Key = TypeVar("_Key")
_Z90 = 1.2816
_HINT_RATE = 0.05
_HINT_DOUBT = 1.0
"""Spread (standard deviation of the logarithm) that the hints of an unknown tenant are taken to have."""
_ERROR_RATE = 1 / 500
_WIDEST = 2.08
"""The prior's percentiles are this far (a factor of eight) from its mean."""


class _Hints:
    """How a tenant's hints relate to what its jobs wrote: moments of log(written / hinted)."""

    __slots__ = ("bias", "count", "variance")

    def __init__(self) -> None:
        self.count = 0
        self.bias = 0.0
        self.variance = _HINT_DOUBT * _HINT_DOUBT

    def learn(self, hint: int, written: int) -> None:
        self.count += 1
        rate = max(_HINT_RATE, 1 / (self.count + 1))
        off = log(written / hint) - self.bias
        self.bias += rate * off
        self.variance += rate * ((1 - rate) * off * off - self.variance)

    def spread(self, hint: int) -> Spread:
        middle = log(hint) + self.bias
        reach = _Z90 * self.variance**0.5
        return Spread(middle - reach, middle + min(self.variance, 2.0) / 2, middle + reach)


class _Tenant:
    __slots__ = ("hints", "models", "templates")

    def __init__(self) -> None:
        self.hints = _Hints()
        self.models: OrderedDict[str, LengthSketch] = OrderedDict()
        self.templates: OrderedDict[tuple[str, str], LengthSketch] = OrderedDict()


class LengthModel:
    """Predicts output lengths and learns from what was written. One owner; no call waits or looks at a clock."""

    def __init__(self, *, short_tokens: int = SHORT_TOKENS) -> None:
        self.short_tokens = short_tokens
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._models: OrderedDict[str, LengthSketch] = OrderedDict()
        self._jobs = 0
        self._abs_log_error = 0.0
        self._coverage = 0.0

    # -- what it says ------------------------------------------------------------------------------------------------

    def predict(self, question: Question) -> Estimate:
        """The length to expect, with a tenth of jobs below `low` and a tenth above `high`."""
        spread = prior(question.prompt_tokens)
        sketch = self._models.get(question.model)
        if sketch is not None:
            spread = _lean(sketch, spread)
        tenant = self._tenants.get(question.tenant)
        if tenant is not None:
            sketch = tenant.models.get(question.model)
            if sketch is not None:
                spread = _lean(sketch, spread)
            if question.template is not None:
                sketch = tenant.templates.get((question.model, question.template))
                if sketch is not None:
                    spread = _lean(sketch, spread)
        if question.hint:
            hints = _Hints() if tenant is None else tenant.hints
            reach = (spread.high - spread.low) / (2 * _Z90)
            # The floor keeps a history of equal answers from shutting out a hint that has been as good.
            own, hinted = max(reach * reach, 1e-4), max(hints.variance, 1e-4)
            spread = spread.towards(hints.spread(question.hint), own / (own + hinted))
        budget = max(1, question.token_budget)
        expected = min(budget, tokens_of(spread.mean))
        return Estimate(
            min(expected, tokens_of(spread.low)), expected, max(expected, min(budget, tokens_of(spread.high)))
        )

    def is_short(self, job: InferenceJob) -> bool:
        """Whether the job belongs with the short ones. Means are pulled up by long tails: doubt makes a job long."""
        return job.footprint.output.expected <= self.short_tokens

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy(self._jobs, self._abs_log_error, self._coverage)

    def hint_error(self, tenant: str) -> float | None:
        """The spread of the tenant's hints around its own bias, as a standard deviation of logarithms."""
        found = self._tenants.get(tenant)
        return found.hints.variance**0.5 if found is not None and found.hints.count else None

    # -- what it learns ----------------------------------------------------------------------------------------------

    def observe(self, question: Question, predicted: Estimate, written: int, *, cut: bool) -> None:
        """A job has ended of itself, or by its limit (`cut`). Jobs that failed or were cancelled teach nothing."""
        if written < 1:
            written = 1
        self._track_error(predicted, written)
        bucket = bucket_of(written)
        model = question.model
        models = self._models
        sketch = models.get(model)
        if sketch is None:
            sketch = _make_room(models, model, MOST_MODELS)
        else:
            models.move_to_end(model)
        sketch.add(bucket, cut)
        tenants = self._tenants
        tenant = tenants.get(question.tenant)
        if tenant is None:
            if len(tenants) >= MOST_TENANTS:
                tenants.popitem(last=False)
            tenant = tenants[question.tenant] = _Tenant()
        else:
            tenants.move_to_end(question.tenant)
        sketch = tenant.models.get(model)
        if sketch is None:
            sketch = _make_room(tenant.models, model, MOST_TEMPLATES)
        sketch.add(bucket, cut)
        if question.template is not None:
            key = (model, question.template)
            sketch = tenant.templates.get(key)
            if sketch is None:
                sketch = _make_room(tenant.templates, key, MOST_TEMPLATES)
            else:
                tenant.templates.move_to_end(key)
            sketch.add(bucket, cut)
        # An answer that was cut says only that a lower hint was too low.
        if question.hint and (not cut or written > question.hint):
            tenant.hints.learn(question.hint, written)

    def _track_error(self, predicted: Estimate, written: int) -> None:
        # Against what was really written, cut or not: that is what the estimate was used for.
        self._jobs += 1
        rate = max(_ERROR_RATE, 1 / self._jobs)
        self._abs_log_error += rate * (abs(log(written / predicted.expected)) - self._abs_log_error)
        inside = predicted.low <= written <= predicted.high
        self._coverage += rate * (inside - self._coverage)


def prior(prompt_tokens: int) -> Spread:
    """What to expect of a job of which only the prompt is known: 256 tokens for 1024, twice that for sixteen times."""
    size = min(65_536, max(16, prompt_tokens))
    mean = log(256) + 0.25 * log(size / 1024)
    return Spread(mean - _WIDEST, mean, mean + _WIDEST)


def expected_remaining(output: Estimate, produced: int, token_budget: int) -> int:
    """What a running job is expected to write yet: at least one token, never more than it may.

    A job that has outlived its expectation is likelier to be a long one than about to end: half of what it has
    written, as for a tail that falls with the third power.
    """
    left = max(output.expected - produced, produced // 2 if produced >= output.expected else 0, 1)
    return max(1, min(left, token_budget - produced))


def _lean(sketch: LengthSketch, on: Spread) -> Spread:
    own = sketch.spread()
    return on if own is None else on.towards(own, sketch.evidence / (sketch.evidence + LEANING))


def _make_room(sketches: OrderedDict[_Key, LengthSketch], key: _Key, most: int) -> LengthSketch:
    if len(sketches) >= most:
        sketches.popitem(last=False)
    sketch = sketches[key] = LengthSketch()
    return sketch
