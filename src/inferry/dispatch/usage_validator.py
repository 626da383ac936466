"""Where what workers say of their use is checked, for every kind of worker: as their ends come in."""

import logging

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Done, End
from inferry.domain.usage import plausible_usage, with_usage
from inferry.domain.values import replace
from inferry.observe.metrics import Metrics

log = logging.getLogger(__name__)


class UsageValidator:
    """Corrects usages that cannot be true, counts them by worker, and says so once for each."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._warned_workers: set[str] = set()

    def corrected(self, attempt: Attempt, end: End) -> End:
        """The end with a usage that can be true, for billing and client alike. A corrected one teaches nothing."""
        usage = plausible_usage(attempt.job, end.usage, attempt.output_tokens, isinstance(end, Done))
        if usage is end.usage:
            return end
        worker = "" if attempt.plan is None else attempt.plan.worker
        attempt.usage_corrected = True
        self._metrics.usage_corrected(worker)
        if worker not in self._warned_workers:
            self._warned_workers.add(worker)
            log.warning("worker %s reported implausible usage; using the gateway's own counts", worker)
        return with_usage(end, usage) if isinstance(end, Done) else replace(end, usage=usage)

    def forget(self, worker: str) -> None:
        self._warned_workers.discard(worker)
