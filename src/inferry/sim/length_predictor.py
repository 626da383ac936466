"""Output lengths in the simulator as the gateway predicts them, with the gateway's own estimator.

Recorded traffic has the tokens that a call wrote and not those that its client requested. Every client is taken to
request `REQUESTED_TOKENS`, to name the step as its template, and to give no hint.
"""

from typing import Final, Literal

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import Estimate
from inferry.prediction.estimator import Estimator
from inferry.prediction.values import Accuracy
from inferry.sim.calls import MODEL, Call

LengthSource = Literal["capped", "true", "predicted"]
"""Where the expected output of a call comes from: its own output up to 256 tokens, its own output, or prediction."""
REQUESTED_TOKENS: Final = 4096


def requested_tokens(call: Call) -> int:
    """What the client of a predicted call requests. It says nothing about the output, unless that is longer."""
    return max(REQUESTED_TOKENS, call.step.output)


def template_of(call: Call) -> str:
    return call.step.name


def true_output(call: Call) -> Estimate:
    return Estimate.exactly(call.step.output)


class LengthPredictor:
    """Predicts the output of calls, and learns from attempts as they end."""

    def __init__(self) -> None:
        self._estimator = Estimator()

    def ended(self, attempt: Attempt, now: float) -> None:
        self._estimator.ended(attempt, now)

    def __call__(self, call: Call) -> Estimate:
        prompt, requested = call.prompt + call.produced, requested_tokens(call)
        return self._estimator.output(call.run.tenant, MODEL, prompt, requested, template_of(call), None)

    @property
    def accuracy(self) -> Accuracy:
        return self._estimator.output_accuracy
