"""Spreads the retry times of callers that have exhausted their own quota.

The gate computes when the next call of a caller fits. If 64 refused calls of one tenant got this same time, they would
retry together, one would be admitted, and the others would have wasted one of their few retries. So each refused call
gets its own retry time. Retry times are as far apart as the quota needs to refill by one call.

No quota is reserved for the retry: another call of the same caller may be admitted before it.
"""

from math import inf
from typing import Final

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, KvQuotaExceeded, RateLimited, TenantConcurrency
from inferry.domain.jobs import InferenceJob
from inferry.domain.tenants import Limits

MAX_RETRY_AFTER_S: Final = 115.0
"""OpenAI's clients do not retry at all when told to wait for more than two minutes."""
MAX_CALLERS: Final = 10_000


class QuotaRetrySpreader:
    """The last retry time given to each caller. The owner of this object supplies the clock."""

    def __init__(self) -> None:
        self._last_retry_at: dict[tuple[str, str], float] = {}

    def assign(self, refusal: GatewayError, job: InferenceJob, caller: Caller, now: float) -> None:
        """Set the refusal's own retry time, no earlier than the one it has."""
        wait_s = refusal.retry_after_s
        if wait_s is None or not isinstance(refusal, RateLimited | TenantConcurrency | KvQuotaExceeded):
            return
        spacing_s = _refill_s_per_call(job, caller) if isinstance(refusal, RateLimited) else wait_s
        caller_key = (caller.tenant.name if caller.key is None else caller.key.key_id, refusal.code)
        at = max(now + wait_s, self._last_retry_at.get(caller_key, -inf) + spacing_s)
        if at - now > max(wait_s, MAX_RETRY_AFTER_S):
            return  # all retry times that clients accept are taken: retries are spread at random
        if len(self._last_retry_at) >= MAX_CALLERS:
            self._last_retry_at = {one: last for one, last in self._last_retry_at.items() if last > now}
        self._last_retry_at[caller_key] = at
        refusal.retry_after_s = at - now
        refusal.has_own_retry_time = True


def _refill_s_per_call(job: InferenceJob, caller: Caller) -> float:
    """Seconds until the quotas have refilled by one call like this."""
    tokens = job.footprint.prompt.expected + min(job.token_budget, job.footprint.output.high) * job.payload.choices
    limits = [caller.tenant.limits] if caller.key is None else [caller.tenant.limits, caller.key.limits]
    return max(_refill_s(one, tokens) for one in limits)


def _refill_s(limits: Limits, tokens: int) -> float:
    requests_s = 60.0 / limits.requests_per_minute if limits.requests_per_minute else 0.0
    tokens_s = 60.0 * tokens / limits.tokens_per_minute if limits.tokens_per_minute else 0.0
    return max(requests_s, tokens_s)
