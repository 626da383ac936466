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

LONGEST_S = 115.0
"""OpenAI's clients do not come back at all when told to wait for more than two minutes."""
MOST_CALLERS = 10_000


class Comebacks:
    """What callers were told last. Times are the owner's."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}

    def tell(self, refusal: GatewayError, job: InferenceJob, caller: Caller, now: float) -> None:
        """Give the refused call a moment of its own, no sooner than the one it was refused with."""
        wait_s = refusal.retry_after_s
        if wait_s is None or not isinstance(refusal, RateLimited | TenantConcurrency):
            return
        each_s = wait_s if isinstance(refusal, TenantConcurrency) else _each_s(job, caller)
        who = (caller.tenant.name if caller.key is None else caller.key.key_id, refusal.code)
        at = max(now + wait_s, self._last.get(who, -inf) + each_s)
        if at - now > max(wait_s, LONGEST_S):
            return  # the whole of what can be told is taken: spread by chance
        if len(self._last) >= MOST_CALLERS:
            self._last = {one: last for one, last in self._last.items() if last > now}
        self._last[who] = at
        refusal.retry_after_s = at - now
        refusal.is_own_turn = True


def _each_s(job: InferenceJob, caller: Caller) -> float:
    """How long the limits take to grow by one call like this."""
    tokens = job.footprint.prompt.expected + min(job.token_budget, job.footprint.output.high) * job.payload.choices
    limits = [caller.tenant.limits] if caller.key is None else [caller.tenant.limits, caller.key.limits]
    return max(_grows_in_s(one, tokens) for one in limits)


def _grows_in_s(limits: Limits, tokens: int) -> float:
    requests_s = 60.0 / limits.requests_per_minute if limits.requests_per_minute else 0.0
    tokens_s = 60.0 * tokens / limits.tokens_per_minute if limits.tokens_per_minute else 0.0
    return max(requests_s, tokens_s)
