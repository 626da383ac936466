"""Where what workers say of their use is checked, for every kind of worker: as their ends come in."""

import logging

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Done, End
from inferry.domain.usage import checked, with_usage
from inferry.domain.values import replace
from inferry.observe.metrics import Metrics

log = logging.getLogger(__name__)


class UsageCheck:
    """Corrects usages that cannot be true, counts them by worker, and says so once for each."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._disbelieved: set[str] = set()

    def of(self, attempt: Attempt, end: End) -> End:
        """The end with a usage that can be true, for billing and client alike. A corrected one teaches nothing."""
        usage = checked(attempt.job, end.usage, attempt.output_tokens)
        if usage is end.usage:
            return end
        worker = "" if attempt.plan is None else attempt.plan.worker
        attempt.usage_corrected = True
        self._metrics.usage_corrected(worker)
        if worker not in self._disbelieved:
            self._disbelieved.add(worker)
            log.warning("worker %s reports a usage that cannot be true; what the gateway counted is used", worker)
        return with_usage(end, usage) if isinstance(end, Done) else replace(end, usage=usage)

    def forget(self, worker: str) -> None:
        self._disbelieved.discard(worker)
