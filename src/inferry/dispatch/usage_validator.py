"""Checks the usage that workers of every kind report at the end of a job."""

import logging

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Done, End
from inferry.domain.usage import plausible_usage, with_usage
from inferry.domain.values import replace
from inferry.observe.metrics import Metrics

log = logging.getLogger(__name__)


class UsageValidator:
    """Corrects implausible usage, counts corrections by worker, and logs the first of each worker."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._warned_workers: set[str] = set()

    def corrected(self, attempt: Attempt, end: End) -> End:
        """The end with a plausible usage, for billing and client alike. Nothing is learned from a corrected one."""
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
