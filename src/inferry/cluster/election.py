"""Keeps a gateway's claim to a domain: renews the lease, and changes the gateway's role as the owner changes.

Belongs to the event loop it is started on. A claim that is not answered is repeated at once; meanwhile the lease ends
on the gateway's own clock.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from inferry.cluster.ownership import NO_OWNER, Owner, OwnershipAuthority, OwnershipLease
from inferry.domain.clock import Clock
from inferry.domain.shared_limits import AuthorityUnavailable

log = logging.getLogger(__name__)

RETRY_S = 0.1
CHANGE_RETRY_S = 1.0


class Role(Protocol):
    """Changes what this gateway does with jobs of the domain."""

    async def become_owner(self, epoch: int, may_send: Callable[[], bool]) -> None:
        """Send jobs to the domain's own workers while `may_send`, and take jobs of other gateways."""

    async def become_ingress(self, address: str, epoch: int) -> None:
        """Pass jobs on to the owner at this address."""


class Election:
    """One gateway's part in the ownership of one domain."""

    def __init__(self, lease: OwnershipLease, authority: OwnershipAuthority, role: Role, clock: Clock) -> None:
        self.lease = lease
        self._authority = authority
        self._role = role
        self._clock = clock
        self._acts_for = NO_OWNER
        self._claims: asyncio.Task[None] | None = None
        self._changes: asyncio.Task[None] | None = None

    @property
    def is_owner(self) -> bool:
        return self.lease.may_send(self._clock.now())

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._claims = loop.create_task(self._claim())

    async def stop(self) -> None:
        """Claim the domain no longer, and change the role no longer. The lease ends with its TTL."""
        tasks = [one for one in (self._claims, self._changes) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Free the domain, so that the next owner need not wait for the TTL. To be called after the last send."""
        await self.stop()
        owner = self.lease.owner
        if owner.gateway == self.lease.gateway:
            await self._resign(owner)

    async def _resign(self, owner: Owner) -> bool:
        """Free the domain; returns whether the authority has answered."""
        self.lease.valid_until = 0.0
        try:
            await self._authority.resign(self.lease.domain, owner.gateway, owner.epoch)
        except AuthorityUnavailable:
            return False
        return True

    async def _claim(self) -> None:
        while True:
            sent_at = self._clock.now()
            try:
                owner = await self._authority.claim(self.lease.claim())
            except AuthorityUnavailable:
                delay_s = RETRY_S
            else:
                self.lease.answered(owner, sent_at)
                delay_s = self.lease.interval_s if owner.gateway else RETRY_S
                self._follow()
            await asyncio.sleep(delay_s)

    def _follow(self) -> None:
        """Change the role where the owner has changed. One change at a time, the latest owner last."""
        if self.lease.owner != self._acts_for and self._changes is None:
            self._changes = asyncio.get_running_loop().create_task(self._change())

    async def _change(self) -> None:
        try:
            while self.lease.owner != self._acts_for:
                owner = self.lease.owner
                try:
                    await self._act(owner)
                except Exception as error:
                    # An OSError is about an address, such as one at which this host cannot listen.
                    is_expected = isinstance(error, OSError)
                    log.error("cannot change the role of this gateway: %s", error, exc_info=not is_expected)
                    # Another gateway may be able to own the workers. The next ownership has another epoch.
                    if owner.gateway == self.lease.gateway and await self._resign(owner):
                        self._acts_for = owner
                else:
                    self._acts_for = owner
                if self._acts_for != owner:
                    await asyncio.sleep(CHANGE_RETRY_S)
        finally:
            self._changes = None

    async def _act(self, owner: Owner) -> None:
        lease, clock = self.lease, self._clock
        if owner.gateway != lease.gateway:
            await self._role.become_ingress(owner.address, owner.epoch)
            return

        def may_send() -> bool:
            return lease.owner.epoch == owner.epoch and lease.may_send(clock.now())

        await self._role.become_owner(owner.epoch, may_send)
