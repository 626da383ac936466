"""The life of an attempt as one stream of events: queued, sent, first token, produced, ended.

The dispatch loop publishes each event once, after it has changed the attempt. An event is a plain call to each of its
subscribers, in order, on the event loop: there is no queue, no task and no object per event. A subscriber must not
block, raise, or call back into the loop. `now` is the gateway's clock in seconds.
"""

from typing import Protocol

from inferry.domain.attempts import Attempt


class OnQueued(Protocol):
    def queued(self, attempt: Attempt, now: float) -> None:
        """The attempt waits for a worker: once per attempt, retries included."""


class OnSent(Protocol):
    def sent(self, attempt: Attempt, now: float) -> None:
        """The attempt was given to `attempt.plan.worker`."""


class OnFirstToken(Protocol):
    def first_token(self, attempt: Attempt, now: float) -> None:
        """The first token has arrived."""


class OnProduced(Protocol):
    def produced(self, attempt: Attempt, now: float) -> None:
        """A later token has arrived; `attempt.last_token_at` is still the time of the token before."""


class OnEnded(Protocol):
    def ended(self, attempt: Attempt, now: float) -> None:
        """The attempt is over, sent or not, and has its `ledger_entry`."""


class JobEvents:
    """Publishes events to their subscribers. The composition root lists all subscriptions."""

    __slots__ = ("_ended", "_first_token", "_produced", "_queued", "_sent")

    def __init__(
        self,
        *,
        queued: tuple[OnQueued, ...] = (),
        sent: tuple[OnSent, ...] = (),
        first_token: tuple[OnFirstToken, ...] = (),
        produced: tuple[OnProduced, ...] = (),
        ended: tuple[OnEnded, ...] = (),
    ) -> None:
        self._queued = queued
        self._sent = sent
        self._first_token = first_token
        self._produced = produced
        self._ended = ended

    def queued(self, attempt: Attempt, now: float) -> None:
        for subscriber in self._queued:
            subscriber.queued(attempt, now)

    def sent(self, attempt: Attempt, now: float) -> None:
        for subscriber in self._sent:
            subscriber.sent(attempt, now)

    def first_token(self, attempt: Attempt, now: float) -> None:
        for subscriber in self._first_token:
            subscriber.first_token(attempt, now)

    def produced(self, attempt: Attempt, now: float) -> None:
        for subscriber in self._produced:
            subscriber.produced(attempt, now)

    def ended(self, attempt: Attempt, now: float) -> None:
        for subscriber in self._ended:
            subscriber.ended(attempt, now)
