"""How jobs that go to one worker at the same time become plans."""

from typing import Final

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.scheduling.queues.queued_job import QueuedJob

_IMMEDIATE: Final = ReleaseReason.IMMEDIATE
_MAX_WAIT: Final = ReleaseReason.MAX_WAIT


class Draft:
    """A plan while a tick forms it."""

    __slots__ = ("bucket", "jobs", "max_batch", "pads", "precision", "reason", "worker")

    def __init__(self, worker: str, precision: str | None, pads: bool, first: QueuedJob) -> None:
        self.worker = worker
        self.precision = precision
        self.pads = pads
        self.reason = first.reason
        self.max_batch = first.rules.max_batch
        self.bucket = first.rules.prompt_bucket(first.job.footprint.prompt.expected) if pads else None
        self.jobs: list[InferenceJob] = [first.job]

    def accepts(self, entry: QueuedJob) -> bool:
        """Whether the job may share the plan. In a padded pass a full batch counts for more than the release reason."""
        if self.reason is _MAX_WAIT or entry.reason is _MAX_WAIT:
            return False
        if self.pads:
            return (
                len(self.jobs) < self.max_batch
                and self.jobs[0].batch_key == entry.job.batch_key
                and self.bucket == entry.rules.prompt_bucket(entry.job.footprint.prompt.expected)
            )
        return self.reason is entry.reason

    def plan(self, plan_id: int, now: float) -> BatchPlan:
        return BatchPlan(
            plan_id=plan_id,
            worker=self.worker,
            jobs=tuple(self.jobs),
            reason=self.reason,
            formed_at=now,
            padded_tokens=max([job.footprint.prompt.expected for job in self.jobs]) if self.pads else None,
            precision=self.precision,
        )


def add_to_drafts(
    entry: QueuedJob, worker: str, precision: str | None, pads: bool, drafts: list[Draft]
) -> Draft | None:
    """Add a job to the draft of its worker that accepts it, or return a new draft for it."""
    if drafts and not pads and entry.reason is _IMMEDIATE is drafts[-1].reason:
        drafts[-1].jobs.append(entry.job)  # the common case
        return None
    for draft in drafts:
        if draft.accepts(entry):
            draft.jobs.append(entry.job)
            return None
    draft = Draft(worker, precision, pads, entry)
    drafts.append(draft)
    return draft
