"""A job whose prompt is computed on a prefill worker: before, after, and what is billed. Pure.

The prefill is an attempt of its own. It ends with `Prefilled`, and the next attempt decodes. Where either fails before
the first token, the next attempt computes the whole call.
"""

from typing import Literal

from inferry.domain.errors import Prefilled
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Prefill
from inferry.domain.streams import Done, End, Usage
from inferry.domain.usage import with_usage
from inferry.domain.values import replace


def for_prefill(job: InferenceJob) -> InferenceJob:
    """The job for a prefill worker, where it writes one token."""
    whole = job.footprint
    return _routed(job, "prefill", Footprint(whole.prompt, whole.cached, Estimate.exactly(1)), Prefill(whole))


def handed_over(job: InferenceJob, ready: Prefilled, usage: Usage) -> InferenceJob:
    """The next attempt after a prefill with this usage: its prompt is there, all but the last token."""
    assert job.prefill is not None
    whole = job.prefill.footprint
    prompt = Estimate.exactly(usage.prompt_tokens) if usage.prompt_tokens else whole.prompt
    footprint = Footprint(prompt, Estimate.exactly(max(0, prompt.expected - 1)), whole.output)
    prefill = Prefill(whole, True, ready.kv_transfer, usage.cached_tokens)
    return replace(_routed(job, "decode", footprint, prefill), attempt=job.attempt + 1, max_wait_s=0.0)


def computed_whole(job: InferenceJob) -> InferenceJob:
    """The job without its prefill: KV can be fetched only once, and may be gone."""
    assert job.prefill is not None
    return _routed(job, None, job.prefill.footprint, Prefill(job.prefill.footprint))


def engine_usage(job: InferenceJob, usage: Usage) -> Usage:
    """The usage by which the engine's work is judged. Engines differ in whether KV handed over counts as cached."""
    if job.prefill is None or not job.prefill.is_handed_over:
        return usage
    return replace(usage, cached_tokens=max(0, usage.prompt_tokens - 1))


def billed_end(job: InferenceJob, end: End) -> End:
    """The end with the usage of the whole call: cached is what the prefill worker had cached."""
    prefill, usage = job.prefill, end.usage
    if prefill is None or not prefill.is_handed_over:
        return end
    cached = min(prefill.cached_tokens, usage.prompt_tokens)
    if cached == usage.cached_tokens:
        return end
    billed = replace(usage, cached_tokens=cached)
    return with_usage(end, billed) if isinstance(end, Done) else replace(end, usage=billed)


def _routed(
    job: InferenceJob, role: Literal["prefill", "decode"] | None, footprint: Footprint, prefill: Prefill
) -> InferenceJob:
    route = replace(job.route, role=role)
    return replace(
        job, route=route, batch_key=replace(job.batch_key, route=route), footprint=footprint, prefill=prefill
    )
