"""The steps by which a gateway gets grants: exchange with the authority, then write to the database, then spend.

The database holds every grant before it is spent, and the number of the authority's generation. An authority that has
lost its state is rebuilt under a new generation. The database then refuses what was granted under the old one, so a
grant is spent only if the rebuilt authority knows it.

Pure: the owner performs one `Step` at a time and reports its result. A step that failed is performed again. Time is an
argument, in seconds on the gateway's monotonic clock.
"""

from typing import Final, NamedTuple

from inferry.admission.grants import GrantTracker
from inferry.domain.shared_limits import REBUILDING, Answer, Ask, Exchanged

RENEWALS_PER_TTL: Final = 3
MARGIN_PER_TTL: Final = 6
"""Grants are spent until this fraction (1/6) of the TTL before its end, which covers drift between clocks."""
UNKNOWN: Final = -1


class Exchange(NamedTuple):
    """Send the asks to the authority, and report to `exchanged`."""

    number: int
    generation: int
    asks: list[Ask]


class WriteHoldings(NamedTuple):
    """Write to the database what this gateway holds by account, if it has the generation; report to `written`."""

    generation: int
    amounts: dict[str, int]


class ReadHoldings(NamedTuple):
    """Read from the database what this gateway holds; report to `read`."""


class Rebuild(NamedTuple):
    """Increment the generation in the database, then read all holdings, then all spending. Pass them to the authority.
    Report to `rebuilt`."""


Step = Exchange | WriteHoldings | ReadHoldings | Rebuild


class GrantProtocol:
    """The state between steps.

    `valid_until`: until then grants may be spent. `is_waiting`: another gateway rebuilds the authority, so the next
    step comes after a pause.
    """

    def __init__(self, tracker: GrantTracker, ttl_s: float) -> None:
        self.tracker = tracker
        self.valid_until = 0.0
        self.generation = UNKNOWN
        self._ttl_s = ttl_s
        self._margin_s = ttl_s / MARGIN_PER_TTL
        self._renewed_at = -ttl_s
        self._database_generation = 0
        self._authority_generation = 0
        self._exchange: Exchange | None = None
        self._answers: list[Answer] | None = None
        self.is_waiting = False
        self._step: Step | None = None
        tracker.set_valid(False)

    @property
    def renew_at(self) -> float:
        """When the next exchange is due, whatever is asked."""
        return self._renewed_at + self._ttl_s / RENEWALS_PER_TTL

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way and none is due, apart from renewals."""
        return self._exchange is None and self._step is None and not self.tracker.is_due

    def check_validity(self, now: float) -> None:
        """Stop spending grants where their time may be over. Called before every admission that follows a pause."""
        if self.tracker.is_valid and now >= self.valid_until:
            self.tracker.set_valid(False)

    def next_step(self, now: float) -> Step | None:
        """What is to be done now; None for nothing."""
        self.check_validity(now)
        if self._step is not None:
            return self._step
        if self._answers is not None and self._exchange is not None:
            return WriteHoldings(self.generation, self.tracker.holdings(self._answers))
        if self.generation == UNKNOWN:
            return Exchange(0, UNKNOWN, [])
        if self._exchange is None and (self.tracker.is_due or now >= self.renew_at):
            number, asks = self.tracker.take_exchange(now)
            self._exchange = Exchange(number, self.generation, asks)
        return self._exchange

    def exchanged(self, result: Exchanged, sent_at: float, now: float) -> None:
        """The authority has answered an exchange that was sent at `sent_at`."""
        if result.answers is None:
            # Everything granted under another generation is void. The database decides which one is next.
            self._discard()
            self.is_waiting = result.generation == REBUILDING
            if self.is_waiting:
                return
            is_stale = result.generation < self._database_generation
            self._step = Rebuild() if is_stale or not result.generation else ReadHoldings()
            self._authority_generation = result.generation
            return
        self.is_waiting = False
        self._renewed_at = sent_at
        self.valid_until = sent_at + self._ttl_s - self._margin_s
        self.tracker.set_valid(now < self.valid_until)
        if self.tracker.holdings(result.answers):
            self._answers = result.answers
        elif self._exchange is not None:
            self._answered(result.answers, now)

    def written(self, database_generation: int, now: float) -> None:
        """The database had this generation. With another one nothing was written."""
        if database_generation != self.generation:
            self._database_generation = database_generation
            self._discard()
        elif self._answers is not None:
            self._answered(self._answers, now)

    def read(self, database_generation: int, amounts: dict[str, int]) -> None:
        """The database has this generation, and these holdings of this gateway."""
        self._step = None
        self._database_generation = database_generation
        if database_generation == self._authority_generation:
            self.generation = database_generation
            self.tracker.rebuilt(amounts)

    def rebuilt(self) -> None:
        """The authority was rebuilt, by this gateway or by another one meanwhile."""
        self._step = None

    def _answered(self, answers: list[Answer], now: float) -> None:
        assert self._exchange is not None
        self.tracker.answered(self._exchange.number, answers, now)
        self._exchange = self._answers = None

    def _discard(self) -> None:
        self.generation = UNKNOWN
        self._exchange = self._answers = None
