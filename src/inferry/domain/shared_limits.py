"""Limits that several gateways share: what a gateway asks of the authority, and what it is answered.

The authority (Redis) grants parts of a limit to gateways. A gateway spends only what it was granted. For every account
the authority keeps: what is settled (spent), and what each gateway holds. Their sum never exceeds the limit.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

REBUILDING = -1
REBUILD_MS = 2000
CONTENTION_MS = 2000


class LimitKind(IntEnum):
    """How an account gets its grants back."""

    BUDGET = 0
    """A ceiling. What a dead gateway holds counts as spent."""
    RATE = 1
    """An amount per minute. A bucket of one minute's amount refills; grants are taken from it."""
    SLOTS = 2
    """A number of concurrent things. What a dead gateway holds is free again after the TTL."""


class Ask(NamedTuple):
    """One account in an exchange.

    - `limit`: the ceiling, the amount per minute, or the number of slots. Each exchange states it, since it may change.
    - `base`: BUDGET: spending by the ledger, for an account that the authority does not know or that has no grants.
      SLOTS: how many the gateway uses. It holds as many of them as other gateways leave.
    - `spent`: the part of the held grant that is used and is in the ledger. It becomes settled.
    - `returned`: the part of the held grant that is given back.
    - `need`: the least that is useful now; `want`: the most that the gateway takes.
    - `keep_s`: how long the authority keeps the account without an exchange.
    """

    account: str
    kind: LimitKind
    limit: int
    base: int = 0
    spent: int = 0
    returned: int = 0
    need: int = 0
    want: int = 0
    keep_s: int = 172_800


class Answer(NamedTuple):
    """The account after the exchange.

    - `granted`: the new grant, at most `want`. It is below `need` where the limit leaves less.
    - `held`: all that the gateway now holds; `others`: all that other gateways hold.
    - `settled`: BUDGET: what is settled; RATE: what is left in the bucket.
    - `is_wanted`: 1 if another gateway was granted less than it needed, less than CONTENTION_MS ago.
    """

    granted: int
    held: int
    others: int
    settled: int
    is_wanted: int = 0


class Exchanged(NamedTuple):
    """Answers in the order of the asks. None: the authority has lost its state, and nothing was applied or granted.

    `generation` counts how often the state was built. 0: the gateway is to rebuild it; REBUILDING: another gateway was
    told to less than REBUILD_MS ago.
    """

    generation: int
    answers: list[Answer] | None


class Holding(NamedTuple):
    """What one gateway holds of an account, as the database has it."""

    holder: str
    account: str
    amount: int


class AuthorityUnavailable(Exception):
    """The authority cannot be reached, or does not answer in time. Its request may have been executed."""


class LimitAuthority(Protocol):
    """Grants limits to gateways. Every method is atomic, and may be repeated after a lost answer."""

    async def exchange(self, holder: str, number: int, generation: int, asks: Sequence[Ask]) -> Exchanged:
        """Settle, return and grant. `number` counts the holder's exchanges: an exchange with the number of the last
        one gets the last one's answers again. An exchange of another generation is answered without answers."""

    async def rebuild(
        self, generation: int, spending: Sequence[tuple[str, int, int]], holdings: Sequence[Holding]
    ) -> None:
        """Replace lost state by what the database has: settled amounts (account, amount, keep_s), and holdings."""


MAX_AMOUNT = 2**53 - 1
"""The largest amount that a script of Redis computes with exactly. Larger limits count as this one."""
_SEPARATOR = "\x1f"


def account_name(scope: str, tenant: str, name: str, period: str, number: int, unit: str) -> str:
    """The authority's name of an account. `scope`: tenant, key or run; `unit`: what is counted."""
    return _SEPARATOR.join((scope, tenant, name, period, str(number), unit))


def keep_s(period: str) -> int:
    """How long an account of the period is kept without use: longer than the period itself."""
    return 2_851_200 if period == "month" else 172_800
