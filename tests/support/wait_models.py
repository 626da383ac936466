"""A wait model with the queue depth that it reads, driven by hand as the job events would."""

from typing import Any

from inferry.domain.queue_depth import QueueDepth
from inferry.prediction.wait_model import WaitModel
from inferry.prediction.wait_prediction import WaitPrediction


class DrivenWaitModel:
    def __init__(self) -> None:
        self.depth = QueueDepth()
        self.model = WaitModel(self.depth)
        self.predict = self.model.predict

    def queued(self, prediction: WaitPrediction, now: float) -> None:
        self.depth.add(prediction.lane, prediction.prompt_tokens, prediction.output_tokens)
        self.model.queued(prediction, now)

    def sent(self, prediction: WaitPrediction, now: float) -> None:
        self.depth.remove(prediction.lane, prediction.prompt_tokens, prediction.output_tokens)
        self.model.sent(prediction, now)

    def left(self, prediction: WaitPrediction, now: float) -> None:
        self.depth.remove(prediction.lane, prediction.prompt_tokens, prediction.output_tokens)
        self.model.left(prediction, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
