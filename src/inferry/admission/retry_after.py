"""When callers that have used up a limit of theirs should come back: one after the other, not all at once.

The gate says when the next call of a caller may come in. Sixty-four agents of one tenant that are all told that moment
come back together, one gets in, and the others have wasted one of the few attempts their clients make. So each is told
a moment of its own, as far behind the one told before as one call takes out of the limit.

Nothing is kept for anybody: the limit is the caller's own, and so are those who may get there first.
"""

from math import inf

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, RateLimited, TenantConcurrency
from inferry.domain.jobs import InferenceJob
from inferry.domain.tenants import Limits

MAX_RETRY_AFTER_S = 115.0
"""OpenAI's clients do not come back at all when told to wait for more than two minutes."""
MAX_CALLERS = 10_000


class RetryAfterSpreader:
    """What callers were told last. Times are the owner's."""

    def __init__(self) -> None:
        self._last_retry_at: dict[tuple[str, str], float] = {}

    def assign(self, refusal: GatewayError, job: InferenceJob, caller: Caller, now: float) -> None:
        """Give the refused call a moment of its own, no sooner than the one it was refused with."""
        wait_s = refusal.retry_after_s
        if wait_s is None or not isinstance(refusal, RateLimited | TenantConcurrency):
            return
        spacing_s = wait_s if isinstance(refusal, TenantConcurrency) else _refill_s_per_call(job, caller)
        caller_key = (caller.tenant.name if caller.key is None else caller.key.key_id, refusal.code)
        at = max(now + wait_s, self._last_retry_at.get(caller_key, -inf) + spacing_s)
        if at - now > max(wait_s, MAX_RETRY_AFTER_S):
            return  # the whole of what can be told is taken: spread by chance
        if len(self._last_retry_at) >= MAX_CALLERS:
            self._last_retry_at = {one: last for one, last in self._last_retry_at.items() if last > now}
        self._last_retry_at[caller_key] = at
        refusal.retry_after_s = at - now
        refusal.has_own_retry_time = True


def _refill_s_per_call(job: InferenceJob, caller: Caller) -> float:
    """How long the limits take to grow by one call like this."""
    tokens = job.footprint.prompt.expected + min(job.token_budget, job.footprint.output.high) * job.payload.choices
    limits = [caller.tenant.limits] if caller.key is None else [caller.tenant.limits, caller.key.limits]
    return max(_refill_s(one, tokens) for one in limits)


def _refill_s(limits: Limits, tokens: int) -> float:
    requests_s = 60.0 / limits.requests_per_minute if limits.requests_per_minute else 0.0
    tokens_s = 60.0 * tokens / limits.tokens_per_minute if limits.tokens_per_minute else 0.0
    return max(requests_s, tokens_s)
