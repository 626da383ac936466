"""The server-sent events of a stream while it runs, for any number of readers, each at its own place."""

from collections.abc import Callable


class EventLog:
    """Events are numbered from 0. `listeners` are called after every change."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.has_ended = False
        self.listeners: set[Callable[[], None]] = set()

    def add(self, piece: bytes) -> None:
        """Add complete events."""
        self.events += split_events(piece)
        self._notify()

    def end(self) -> None:
        self.has_ended = True
        self._notify()

    def _notify(self) -> None:
        for listener in list(self.listeners):
            listener()


def split_events(events: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in events.split(b"\n\n") if event]
