"""Writes the events of a background response to a client, those that exist and those to come."""

from inferry.durable.event_log import EventLog
from inferry.ingress.http.reply import Reply

SSE = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"


class Follower:
    """One client. It reads the log at its own pace and cancels nothing when it disconnects."""

    def __init__(self, event_log: EventLog, start: int, reply: Reply) -> None:
        self._log = event_log
        self._next = start
        self._reply = reply

    def start(self, headers: bytes) -> None:
        self._reply.on_disconnect = self.stop
        self._reply.on_writable = self.write
        self._reply.begin(SSE + headers)
        self._log.listeners.add(self.write)
        self.write()

    def stop(self) -> None:
        self._log.listeners.discard(self.write)

    def write(self) -> None:
        """Write what is new, unless the client has not read what it got before."""
        reply, event_log = self._reply, self._log
        if reply.is_disconnected or reply.is_paused:
            return
        events = event_log.events[self._next :]
        self._next += len(events)
        if event_log.has_ended:
            self.stop()
            reply.on_disconnect = reply.on_writable = None
            reply.end(b"".join(events))
        else:
            reply.write(b"".join(events))


def follow(event_log: EventLog, start: int, reply: Reply, headers: bytes) -> None:
    """Write events from number `start` until the end of the stream."""
    Follower(event_log, start, reply).start(headers)
