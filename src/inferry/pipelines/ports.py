"""What a run needs of the gateway: calls of its endpoints, as the client that started the run."""

from typing import Protocol

from inferry.pipelines.batch_sizes import MapLoad
from inferry.pipelines.composed import Fields


class Calls(Protocol):
    """Makes the calls of one run. Cancelling the task cancels the call."""

    async def step(self, stage: str, path: str, fields: Fields, deadline_ms: int | None) -> bytes:
        """The body of an endpoint's answer. Raises the GatewayError of a call that fails."""
        ...

    async def respond(self, stage: str, fields: Fields, deadline_ms: int | None) -> None:
        """Answer the client with the response to a chat request."""
        ...

    def queued(self) -> int:
        """Jobs queued in the lane of the run."""
        ...

    def queued_for(self, model: str) -> int:
        """Those that wait for a worker of the model."""
        ...

    def queue_limit(self) -> int:
        """Jobs up to which the lane of the run takes new ones."""
        ...

    def map_load(self) -> MapLoad:
        """What the maps of all runs have in flight in the lane of the run."""
        ...

    def workers(self, model: str) -> int:
        """Workers that are ready and serve the model."""
        ...

    def now(self) -> float: ...
