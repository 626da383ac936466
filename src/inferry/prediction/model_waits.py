"""Predicted waits by model: workers of one model do not drain the queue of another.

Only overflow asks for these. Subscribes to `queued`, `sent` and `ended`.
"""

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import QueuedAhead
from inferry.domain.queue_depth import QueueDepth
from inferry.prediction.wait_model import NOTHING_AHEAD, WaitModel
from inferry.prediction.wait_prediction import WaitPrediction


class ModelWaits:
    """A wait model for each model that own workers were asked for."""

    def __init__(self) -> None:
        self._depth = QueueDepth()
        self._depths: dict[str, QueueDepth] = {}
        self._waits: dict[str, WaitModel] = {}
        self._predictions: dict[str, WaitPrediction] = {}

    def predict(self, job: InferenceJob, ahead: QueuedAhead, now: float) -> WaitPrediction:
        """The wait of the job on own workers; `ahead` is what is queued before it, of all models."""
        depth, waits = self._of(job.route.model)
        queued, in_all = depth.at_or_above[job.lane], self._depth.at_or_above[job.lane]
        if not queued or not in_all:
            ahead = NOTHING_AHEAD
        elif queued != in_all:
            parts = [part * queued // in_all for part in (ahead.jobs, ahead.prompt_tokens, ahead.output_tokens)]
            ahead = QueuedAhead(*parts)
        return waits.predict(job.lane, job.footprint.prefill_tokens, job.footprint.output.expected, ahead, now)

    # -- events ------------------------------------------------------------------------------------------------------

    def queued(self, attempt: Attempt, now: float) -> None:
        if attempt.job.overflow is None:
            depth, waits = self._of(attempt.job.route.model)
            of_all = attempt.predicted
            prediction = self.predict(attempt.job, of_all.ahead, now) if isinstance(of_all, WaitPrediction) else None
            self._depth.queued(attempt, now)
            depth.queued(attempt, now)
            if prediction is None:
                waits.depth_changed(attempt.job.lane, now)
            else:
                self._predictions[attempt.job.job_id] = prediction
                waits.queued(prediction, now)

    def sent(self, attempt: Attempt, now: float) -> None:
        if attempt.job.overflow is None:
            depth, waits = self._of(attempt.job.route.model)
            self._depth.sent(attempt, now)
            depth.sent(attempt, now)
            prediction = self._predictions.pop(attempt.job.job_id, None)
            if prediction is None:
                waits.depth_changed(attempt.job.lane, now)
            else:
                waits.sent(prediction, now)

    def ended(self, attempt: Attempt, now: float) -> None:
        if attempt.job.overflow is None and attempt.sent_at is None:
            depth, waits = self._of(attempt.job.route.model)
            self._depth.ended(attempt, now)
            depth.ended(attempt, now)
            prediction = self._predictions.pop(attempt.job.job_id, None)
            if prediction is None:
                waits.depth_changed(attempt.job.lane, now)
            else:
                waits.left(prediction, now)

    def _of(self, model: str) -> tuple[QueueDepth, WaitModel]:
        depth = self._depths.get(model)
        if depth is None:
            depth = self._depths[model] = QueueDepth()
            self._waits[model] = WaitModel(depth)
        return depth, self._waits[model]
