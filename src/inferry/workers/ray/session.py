"""The gateway's session with the engine of a replica: messages in their order, and the keys that the engine holds.

Pure: `EngineHost` owns the session, calls it from one event loop, and sends what it returns.
"""

from inferry.engine.messages import Aborted, Add, Frames, FromEngine, Rejected, StepDone, ToEngine, decode_to_engine


class Session:
    """`keys` are the requests of this session that the engine has not ended.

    Ray may deliver two calls out of order, so every batch of messages has a number and waits for those before it.
    """

    def __init__(self, session_id: str, now: float) -> None:
        self.session_id = session_id
        self.heard_at = now
        self.keys: set[int] = set()
        self._frames = Frames()
        self._next_number = 0
        self._early: dict[int, bytes] = {}

    def received(self, number: int, data: bytes, now: float) -> list[ToEngine]:
        """The messages that are complete and in order now."""
        self.heard_at = now
        self._early[number] = data
        messages: list[ToEngine] = []
        while (batch := self._early.pop(self._next_number, None)) is not None:
            self._next_number += 1
            messages += map(decode_to_engine, self._frames.feed(batch))
        for message in messages:
            if isinstance(message, Add):
                self.keys.update(request.key for request in message.requests)
        return messages

    def sent(self, message: FromEngine) -> None:
        """The engine has sent this message: keys that it ends are free."""
        match message:
            case StepDone(_, ends):
                self.keys.difference_update(end.account.key for end in ends)
            case Aborted(_, freed):
                self.keys.difference_update(account.key for account in freed)
            case Rejected(key):
                self.keys.discard(key)
            case _:
                pass
