"""Validation of the usage that workers report, before it is billed, learned from or returned.

Counts are rejected if they are negative, if the prompt exceeds the model's context, or if the output exceeds the job's
limit; of a finished job also if the prompt is empty or the output less than was counted while streaming. A rejected
count is replaced by the gateway's own: the estimated prompt, the output counted while streaming.
"""

from math import isfinite
from typing import Final

import msgspec

from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, Usage
from inferry.domain.values import replace

TOLERANCE_TOKENS: Final = 64
"""Tolerance above the output limit, in addition to an eighth of it: engines count tokens differently."""
TEMPLATE_TOKENS: Final = 4096
"""Prompt tokens that a chat template may add. The rest of a text-only body has at most one token per byte."""
MEDIA_TOKENS: Final = 1_000_000
"""Most prompt tokens of a body with media if the context is unknown. Media may be links, so their size is no bound."""
_MEDIA = (b'"image', b'"video', b'"input_audio', b'"audio', b'"file', b'"document')


def plausible_usage(job: InferenceJob, usage: Usage, counted: int, is_done: bool = False) -> Usage:
    """The usage if it is plausible, else a corrected one. `counted` is the output counted while streaming."""
    min_prompt, min_output = (1, counted) if is_done else (0, 0)
    prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
    gpu_s = usage.gpu_seconds
    is_timed = gpu_s is None or (isfinite(gpu_s) and gpu_s >= 0.0)
    limit = job.payload.output_limit
    limit = job.token_budget if limit is None else limit
    if (
        0 <= cached <= prompt <= _max_plausible_prompt(job, prompt)
        and min_prompt <= prompt
        and min_output <= output <= max_plausible_output(limit)
        and is_timed
    ):
        return usage
    if not min_prompt <= prompt <= _max_plausible_prompt(job, prompt):
        prompt = job.footprint.prompt.expected
    if not min_output <= output <= max_plausible_output(limit):
        output = counted
    return Usage(prompt, min(max(cached, 0), prompt), output, gpu_s if is_timed else None)


def max_plausible_output(limit: int) -> int:
    """Largest plausible output for an output limit."""
    return limit + limit // 8 + TOLERANCE_TOKENS


def _max_plausible_prompt(job: InferenceJob, reported: int) -> int:
    payload = job.payload
    if payload.context_tokens is not None:
        return payload.context_tokens
    resume_point = job.resume_point
    highest = len(payload.body) + TEMPLATE_TOKENS
    if payload.pooled is not None:
        highest *= payload.pooled.count  # a text may be part of every pair
    if resume_point is not None:
        highest = max(highest, len(resume_point.prompt_ids) + len(resume_point.output_ids))
    if reported <= highest or not any(kind in payload.body for kind in _MEDIA):
        return highest
    return highest + MEDIA_TOKENS


def with_usage(end: Done, usage: Usage) -> Done:
    """The end with this usage, and its usage event rewritten to match."""
    event: dict[str, object] = {"choices": []}
    if end.raw.startswith(b"data:"):
        event = msgspec.json.decode(end.raw[5:], type=dict[str, object])
    event["usage"] = usage_object(usage)
    raw = b"data: " + msgspec.json.encode(event) + b"\n\n"
    return replace(end, usage=usage, raw=raw)


def usage_object(usage: Usage) -> dict[str, object]:
    """The usage as OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
