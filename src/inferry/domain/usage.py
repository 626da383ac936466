"""What a worker says a job used, checked before anything is billed, learned or shown.

A worker is not believed what cannot be: a count below zero, a prompt beyond the model's context, more output than the
job may write. What is not believed is replaced by what the gateway knows itself: the prompt as it was estimated, the
output as it was counted while it streamed.
"""

from math import isfinite

import msgspec

from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, Usage
from inferry.domain.values import replace

TOLERANCE_TOKENS = 64
"""Beyond what was asked for, plus an eighth: events are not quite tokens, and engines differ in what they count."""
TEMPLATE_TOKENS = 4096
"""What a chat template may add to a body. A token is at least one byte of the rest of it, where all of it is text."""
MEDIA_TOKENS = 1_000_000
"""What a body with images, sounds, videos or files may come to, where the context is not known: they may be links, so
nothing bounds them by their size.
"""
_MEDIA = (b'"image', b'"video', b'"input_audio', b'"audio', b'"file', b'"document')


def plausible_usage(job: InferenceJob, usage: Usage, counted: int) -> Usage:
    """The same usage where it can be true, else one that can. `counted` is the output seen while it streamed."""
    prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
    gpu_s = usage.gpu_seconds
    is_timed = gpu_s is None or (isfinite(gpu_s) and gpu_s >= 0.0)
    limit = job.payload.output_limit
    limit = job.token_budget if limit is None else limit
    if (
        0 <= cached <= prompt <= _max_plausible_prompt(job, prompt)
        and 0 <= output <= max_plausible_output(limit)
        and is_timed
    ):
        return usage
    if not 0 <= prompt <= _max_plausible_prompt(job, prompt):
        prompt = job.footprint.prompt.expected
    if not 0 <= output <= max_plausible_output(limit):
        output = counted
    return Usage(prompt, min(max(cached, 0), prompt), output, gpu_s if is_timed else None)


def max_plausible_output(limit: int) -> int:
    """Tokens that an engine may be heard to write where `limit` was asked for."""
    return limit + limit // 8 + TOLERANCE_TOKENS


def _max_plausible_prompt(job: InferenceJob, reported: int) -> int:
    payload = job.payload
    if payload.context_tokens is not None:
        return payload.context_tokens
    resume_point = job.resume_point
    highest = len(payload.body) + TEMPLATE_TOKENS
    if resume_point is not None:
        highest = max(highest, len(resume_point.prompt_ids) + len(resume_point.output_ids))
    if reported <= highest or not any(kind in payload.body for kind in _MEDIA):
        return highest
    return highest + MEDIA_TOKENS


def with_usage(end: Done, usage: Usage) -> Done:
    """The end with this usage, and its usage event with the same figures: a client is shown what is billed."""
    event: dict[str, object] = {"choices": []}
    if end.raw.startswith(b"data:"):
        event = msgspec.json.decode(end.raw[5:], type=dict[str, object])
    event["usage"] = usage_object(usage)
    raw = b"data: " + msgspec.json.encode(event) + b"\n\n"
    return replace(end, usage=usage, raw=raw)


def usage_object(usage: Usage) -> dict[str, object]:
    """A usage in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
