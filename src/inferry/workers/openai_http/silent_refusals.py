"""Calls at a server that does not say why it refuses a stream."""

from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.workers.openai_http.calls import Call, CallOwner
from inferry.workers.plan_completion import PlanCompletion


class SilentRefusalCall(Call):
    """A job whose stream ends without an event where the server refuses it, as for a prompt that is too long.

    Sent once more without streaming and for one token (`asks_why`), the server answers with an error. Else the client's
    mistake would look like a broken server.
    """

    __slots__ = ("asks_why",)

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion, worker: CallOwner) -> None:
        super().__init__(job, emit, completion, worker)
        self.asks_why = False

    def on_end(self) -> None:
        if self._status == 200 and self.end is None and not self.asks_why and not self._scanner.events:
            self.connection = None
            self.asks_why = True
            self.reset()
            self._worker.send(self)
        else:
            super().on_end()
