"""Prediction of a job's output length.

Three sources are combined:

- *History* on three levels: (tenant, template, model), (tenant, model), (model). A level with n outputs has the weight
  n / (n + 4); the rest of the weight belongs to the next, more general level.
- *Prompt length* is the prior below all history. Output grows slowly with the prompt.
- *The client's hint* (`x-inferry-expected-output-tokens`). The model tracks bias and variance of each tenant's hints.
  A hint is corrected by the bias and weighted by its precision, so a constant hint of 4096 soon has little weight.

`expected` is a mean, because packing sums it over jobs. `low` and `high` are the 10th and 90th percentiles. All are
capped by the job's token budget.

Clients choose the names of tenants and templates, so both are bounded, least recently used first. A tenant that invents
templates evicts only its own.
"""

from collections import OrderedDict
from math import log
from typing import Final, TypeVar

from inferry.domain.jobs import Estimate, InferenceJob
from inferry.prediction.length_sketch import LengthSketch, bucket_of, tokens_of
from inferry.prediction.values import Accuracy, LengthQuery, Spread

MAX_TENANTS = 512
MAX_TEMPLATES_PER_TENANT = 64
"""With both limits reached, the sketches take about 25 MB."""
MAX_MODELS = 256
SHRINKAGE_COUNT: Final = 4.0
"""After this many outputs a level of history has the same weight as the levels below it."""
SHORT_OUTPUT_TOKENS: Final = 256

_Key = TypeVar("_Key")
_Z90: Final = 1.2816
_HINT_RATE: Final = 0.05
_HINT_PRIOR_STD: Final = 1.0
"""Standard deviation of log(output / hint) assumed for a tenant without history."""
_ERROR_RATE: Final = 1 / 500
_PRIOR_HALF_WIDTH: Final = 2.08
"""Distance of the prior's percentiles from its mean, as a logarithm: a factor of eight."""


class _HintAccuracy:
    """Bias and variance of log(output / hint) of one tenant."""

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
    """Predicts output lengths and learns from ended jobs. It has one owner, never waits and reads no clock."""

    def __init__(self, *, short_output_tokens: int = SHORT_OUTPUT_TOKENS) -> None:
        self.short_output_tokens = short_output_tokens
        self._tenants: OrderedDict[str, _TenantHistory] = OrderedDict()
        self._models: OrderedDict[str, LengthSketch] = OrderedDict()
        self._jobs = 0
        self._abs_log_error = 0.0
        self._coverage = 0.0

    # -- prediction --------------------------------------------------------------------------------------------------

    def predict(self, query: LengthQuery) -> Estimate:
        """The expected length; a tenth of jobs is below `low` and a tenth above `high`."""
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
            # The floor on variances gives an exact hint weight beside a history of equal lengths.
            own_variance, hinted = max(half_width * half_width, 1e-4), max(hints.variance, 1e-4)
            spread = spread.mixed_with(hints.spread(query.hint), own_variance / (own_variance + hinted))
        budget = max(1, query.token_budget)
        expected = min(budget, tokens_of(spread.mean))
        return Estimate(
            min(expected, tokens_of(spread.low)), expected, max(expected, min(budget, tokens_of(spread.high)))
        )

    def is_short(self, job: InferenceJob) -> bool:
        """Whether the job's expected output is short. Long tails raise the mean, so an uncertain job counts as long."""
        return job.footprint.output.expected <= self.short_output_tokens

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy(self._jobs, self._abs_log_error, self._coverage)

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, query: LengthQuery, predicted: Estimate, output_tokens: int, *, truncated: bool) -> None:
        """Learn from a job that ended by itself, or at its token limit (`truncated`).

        Failed and cancelled jobs are not observed.
        """
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
        # A truncated output is only evidence against a hint below its length.
        if query.hint and (not truncated or output_tokens > query.hint):
            tenant.hints.learn(query.hint, output_tokens)

    def _track_error(self, predicted: Estimate, output_tokens: int) -> None:
        # Truncated outputs count too: the estimate was used for the tokens actually generated.
        self._jobs += 1
        rate = max(_ERROR_RATE, 1 / self._jobs)
        self._abs_log_error += rate * (abs(log(output_tokens / predicted.expected)) - self._abs_log_error)
        is_covered = predicted.low <= output_tokens <= predicted.high
        self._coverage += rate * (is_covered - self._coverage)


def prior(prompt_tokens: int) -> Spread:
    """The spread for a job without history: 256 output tokens for a prompt of 1024, growing with its fourth root."""
    clamped_tokens = min(65_536, max(16, prompt_tokens))
    mean = log(256) + 0.25 * log(clamped_tokens / 1024)
    return Spread(mean - _PRIOR_HALF_WIDTH, mean, mean + _PRIOR_HALF_WIDTH)


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
