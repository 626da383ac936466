"""A body that is taken while it arrives, instead of being kept in memory."""

from collections.abc import Callable

from inferry.domain.errors import GatewayError


class BodySink:
    """Takes up to `max_bytes` of a body. The connection reads nothing more while `is_full`.

    `problem` refuses the request before its body is complete. `on_change` is set by the connection; the sink calls it
    when it is no longer full, or has a problem.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.is_full = False
        self.problem: GatewayError | None = None
        self.on_change: Callable[[], None] | None = None

    def feed(self, data: bytes) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """The body is complete."""
        raise NotImplementedError

    def abort(self) -> None:
        """The rest of the body will not come, or the request was refused. Called any number of times."""
        raise NotImplementedError
