"""Ownership of a domain of worker groups: one gateway at a time sends jobs to its engines.

Engines cannot check who sends, so the owner checks its own lease, on its own monotonic clock, before every send. A
lease is counted from before its request was sent, and ends one margin before the authority's TTL: at any time at most
one gateway believes that it owns the domain, while clocks drift by less than the margin's fraction of the TTL.

Every owner has an epoch, which is larger than that of all owners before it. What comes from an older epoch is dropped.
An epoch is at least the authority's time in milliseconds, so that it also grows where the last one is forgotten.

An authority that has lost its state grants ownership one TTL after its start: until then the last owner may still send.
"""

from typing import NamedTuple, Protocol

MARGIN_PER_TTL = 6
RENEWALS_PER_TTL = 3
MAX_TTL_MS = 3000
"""A dead owner is replaced within its TTL and one retry: with at most 3 s, within 5 s."""


class Claim(NamedTuple):
    """A gateway's request to own a domain. `seen_epoch`: the largest epoch that it knows of."""

    domain: str
    gateway: str
    address: str
    seen_epoch: int


class Owner(NamedTuple):
    """The owner of a domain. Gateway "": none, the domain is free after a wait."""

    gateway: str
    address: str
    epoch: int


NO_OWNER = Owner("", "", 0)


class OwnershipAuthority(Protocol):
    """Redis, or a model of it. Every method is atomic, and may be repeated."""

    async def claim(self, claim: Claim) -> Owner:
        """Make the gateway the owner if the domain is free, or renew its ownership; return the owner."""

    async def resign(self, domain: str, gateway: str, epoch: int) -> None:
        """Free the domain at once, if the gateway owns it."""


class OwnershipLease:
    """One gateway's part in one domain. Time is an argument, in seconds on the gateway's monotonic clock."""

    def __init__(self, domain: str, gateway: str, address: str, ttl_s: float) -> None:
        self.domain = domain
        self.gateway = gateway
        self.address = address
        self.owner = NO_OWNER
        self.valid_until = 0.0
        self._ttl_s = ttl_s
        self._margin_s = ttl_s / MARGIN_PER_TTL

    @property
    def interval_s(self) -> float:
        """Seconds between two claims, made by owners and by others alike."""
        return self._ttl_s / RENEWALS_PER_TTL

    def may_send(self, now: float) -> bool:
        """Whether this gateway owns the domain at `now`. To be checked before every send."""
        return self.owner.gateway == self.gateway and now < self.valid_until

    def claim(self) -> Claim:
        return Claim(self.domain, self.gateway, self.address, self.owner.epoch)

    def answered(self, owner: Owner, sent_at: float) -> None:
        """The authority has answered a claim that was sent at `sent_at`."""
        if owner.gateway == self.gateway:
            self.valid_until = max(self.valid_until, sent_at + self._ttl_s - self._margin_s)
        if owner.epoch >= self.owner.epoch:
            self.owner = owner

    def accepts(self, epoch: int) -> bool:
        """Whether a message of this epoch comes from the present owner, not from an earlier one."""
        return epoch >= self.owner.epoch


class InMemoryOwnership:
    """The reference for the script that Redis runs. Time is in milliseconds on the authority's clock."""

    def __init__(self, ttl_ms: int, now_ms: int = 0) -> None:
        self._ttl_ms = ttl_ms
        self.lose_state(now_ms)

    def lose_state(self, now_ms: int) -> None:
        self._started_ms = now_ms
        self._owners: dict[str, tuple[Owner, int]] = {}
        self._epochs: dict[str, int] = {}

    def claim(self, claim: Claim, now_ms: int) -> Owner:
        owner, until_ms = self._owners.get(claim.domain, (NO_OWNER, 0))
        if now_ms < until_ms and owner.gateway != claim.gateway:
            return owner
        if now_ms >= until_ms:
            if now_ms - self._started_ms < self._ttl_ms:
                return NO_OWNER
            epoch = max(self._epochs.get(claim.domain, 0) + 1, claim.seen_epoch + 1, now_ms)
            self._epochs[claim.domain] = epoch
            owner = Owner(claim.gateway, claim.address, epoch)
        self._owners[claim.domain] = (owner, now_ms + self._ttl_ms)
        return owner

    def resign(self, domain: str, gateway: str, epoch: int) -> None:
        owner, _ = self._owners.get(domain, (NO_OWNER, 0))
        if (owner.gateway, owner.epoch) == (gateway, epoch):
            del self._owners[domain]
