"""Which calls have their prompt computed on a prefill worker. Belongs to the dispatch loop."""

from inferry.domain.jobs import InferenceJob
from inferry.domain.prefill import for_prefill
from inferry.domain.values import replace
from inferry.domain.workers import WorkerView
from inferry.scheduling.scheduler import Scheduler


class PrefillRouter:
    """Chooses these calls when they arrive. `is_enabled`: there is a worker of role `prefill`, up or not."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.is_enabled = False

    def view_changed(self, view: WorkerView) -> None:
        self.is_enabled = self.is_enabled or view.role == "prefill"

    def redirect(self, job: InferenceJob) -> InferenceJob:
        """The job for a prefill worker, or unchanged: its prompt is short, its lane has no pair of workers that are up,
        or it is of a kind whose KV is not handed over.
        """
        payload, route = job.payload, job.route
        if (
            payload.pooled is not None
            or payload.non_streaming
            or payload.choices != 1
            or payload.media_bytes
            or job.resume_point is not None
            or route.overflow
        ):
            return job
        tokens = job.footprint.prefill_tokens
        prefilling = self._scheduler.views_up(job.lane, replace(route, role="prefill"))
        if not any(tokens >= view.min_prefill_tokens for view in prefilling):
            return job
        if not any(view.role == "decode" for view in self._scheduler.views_up(job.lane, route)):
            return job
        return for_prefill(job)

    def is_stranded(self, job: InferenceJob) -> bool:
        """Whether the job waits for a prefill worker and none is up."""
        return job.route.role == "prefill" and not self._scheduler.views_up(job.lane, job.route)
