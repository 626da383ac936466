"""The footprint of a call, estimated from what calls like it have used. Pure.

One estimator owns the three models behind a footprint: tokens per byte, prefix cache hits and output length. It
subscribes to `ended` and learns from every complete answer.
"""

from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import Estimate, Footprint
from inferry.domain.streams import Done, FinishReason
from inferry.prediction.output_length import OutputLengthModel
from inferry.prediction.prefix_hits import NO_MATCH, PrefixHitModel
from inferry.prediction.token_ratio import TokenRatios
from inferry.prediction.values import Accuracy, LengthQuery

MIN_PREDICTED_TOKENS: Final = 32
"""A job with a smaller budget is assumed to write all of it."""
_NO_CACHED_TOKENS: Final = Estimate.exactly(0)


class Estimator:
    def __init__(self) -> None:
        self._ratios = TokenRatios()
        self._prefixes = PrefixHitModel()
        self._lengths = OutputLengthModel()
        self.learn_cached = self._prefixes.learn_totals

    @property
    def output_accuracy(self) -> Accuracy:
        """How accurate output predictions have been recently."""
        return self._lengths.accuracy

    def prompt(self, tenant: str, model: str, template: str | None, size: int) -> Estimate:
        """Prompt tokens of a body of `size` bytes."""
        return self._ratios.estimate(model, _scoped_template(tenant, template), size)

    def output(
        self, tenant: str, model: str, prompt_tokens: int, budget: int, template: str | None, hint: int | None
    ) -> Estimate:
        """Output tokens of a call that may write `budget`."""
        return self._lengths.predict(LengthQuery(tenant, model, prompt_tokens, budget, template, hint))

    def cached(self, tenant: str, model: str, body: bytes, prompt: Estimate) -> tuple[Estimate, tuple[str, ...]]:
        """Prompt tokens that the engine will find in its prefix cache, and the prefix shared with other calls."""
        prefix_match = self._prefixes.match(tenant, model, body)
        if prefix_match is NO_MATCH:
            return _NO_CACHED_TOKENS, ()
        known = int(prompt.expected * prefix_match.share)
        return Estimate(0, self._prefixes.expected(model, known), known), prefix_match.chain

    def footprint(
        self,
        tenant: str,
        model: str,
        body: bytes,
        prompt: Estimate,
        budget: int,
        *,
        ignore_eos: bool,
        template: str | None,
        hint: int | None,
    ) -> tuple[Footprint, tuple[str, ...]]:
        """The whole estimate of a call, with its prefix. A call that ignores the end of sequence writes its budget."""
        output = (
            Estimate.exactly(budget)
            if ignore_eos or budget <= MIN_PREDICTED_TOKENS
            else self.output(tenant, model, prompt.expected, budget, template, hint)
        )
        cached, prefix = self.cached(tenant, model, body, prompt)
        return Footprint(prompt, cached, output), prefix

    def ended(self, attempt: Attempt, now: float) -> None:
        """Learn from an attempt that is a complete answer, with a usage that can be true and no budget's stop."""
        end = attempt.end
        if not isinstance(end, Done) or end.stopped is not None or not attempt.is_representative:
            return
        job, usage = attempt.job, end.usage
        footprint = job.footprint if job.prefill is None else job.prefill.footprint
        predicted, prompt, model = footprint.output, footprint.prompt, job.route.model
        if attempt.finds_prefix:
            self._prefixes.learn(model, footprint.cached.high, usage.cached_tokens)
        # Only a fixed output was not predicted. A prediction that is down to one value continues to learn.
        if not (predicted.is_exact and predicted.expected >= job.token_budget):
            query = LengthQuery(job.tenant, model, prompt.expected, job.token_budget, job.template_id, job.output_hint)
            self._lengths.observe(query, predicted, usage.output_tokens, truncated=end.finish is FinishReason.LENGTH)
        if not prompt.is_exact and not job.payload.media_bytes:  # the tokens of media are not known
            template = _scoped_template(job.tenant, job.template_id)
            self._ratios.learn(model, template, len(job.payload.body), usage.prompt_tokens)


def _scoped_template(tenant: str, template: str | None) -> str | None:
    """Templates are scoped by tenant: two tenants may use one name for different templates."""
    return None if template is None else f"{tenant} {template}"
