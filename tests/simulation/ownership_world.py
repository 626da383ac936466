"""Gateways that compete for one domain in virtual time, by seed: the real leases and the model of the authority."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from inferry.cluster.ownership import Claim, InMemoryOwnership, Owner, OwnershipLease

TTL_S = 3.0
DRIFT = 0.05
RETRY_S = 0.3
REPLACED_WITHIN_S = 5.0


class Contender:
    """One process. Its clock starts anywhere and runs at its own rate; while it is paused, nothing in it happens."""

    def __init__(self, world: "OwnershipWorld", name: str) -> None:
        self.world = world
        self.rate, self.offset = 1 + world.rng.uniform(-DRIFT, DRIFT), world.rng.uniform(0, 1e6)
        self.lease = OwnershipLease("domain", name, f"address of {name}", TTL_S)
        self.is_dead = False
        self.paused_until = 0.0
        self._attempt = 0
        self._claim()

    @property
    def clock(self) -> float:
        return self.world.now * self.rate + self.offset

    def may_send(self) -> bool:
        return not self.is_dead and self.lease.may_send(self.clock)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.at(self.world.now + delay_s, partial(self._run, action))

    def _run(self, action: Callable[[], None]) -> None:
        if self.is_dead:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, partial(self._run, action))
        else:
            action()

    def _claim(self) -> None:
        self._attempt += 1
        self.later(RETRY_S, partial(self._time_out, self._attempt))
        if not self.world.is_lost():
            arrive = partial(self._arrive, self.lease.claim(), self._attempt, self.clock)
            self.world.at(self.world.now + self.world.delay_s(), arrive)

    def _arrive(self, claim: Claim, attempt: int, sent_at: float) -> None:
        if not self.world.is_down:
            owner = self.world.authority.claim(claim, self.world.authority_ms)
            if not self.world.is_lost():
                self.later(self.world.delay_s(), partial(self._answered, owner, attempt, sent_at))

    def _answered(self, owner: Owner, attempt: int, sent_at: float) -> None:
        self.lease.answered(owner, sent_at)
        self.world.owned(owner)
        if attempt == self._attempt:
            self._attempt += 1
            self.later(self.lease.interval_s / self.rate, self._claim)

    def _time_out(self, attempt: int) -> None:
        if attempt == self._attempt:
            self._claim()


class OwnershipWorld:
    def __init__(self, seed: int, *, gateways: int = 3, loses_messages: bool = True) -> None:
        self.rng = rng = random.Random(f"{seed}/ownership")
        self.now = 0.0
        self.is_down = False
        self._loss = rng.choice([0.0, 0.1, 0.3]) if loses_messages else 0.0
        self._slow = loses_messages and rng.random() < 0.3
        self._rate = 1 + rng.uniform(-DRIFT, DRIFT)
        self.authority = InMemoryOwnership(int(TTL_S * 1000))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.faults: Counter[str] = Counter()
        self.epochs: dict[int, str] = {}
        self.gaps: list[float] = []
        self._free_since: float | None = 0.0
        self.contenders = [Contender(self, f"gateway-{number}") for number in range(gateways)]
        self.sends = 0
        self._look()

    @property
    def authority_ms(self) -> int:
        return int(self.now * self._rate * 1000)

    def delay_s(self) -> float:
        return self.rng.uniform(0.0002, 1.5 if self._slow else 0.01)

    def is_lost(self) -> bool:
        found = self.rng.random() < self._loss
        self.faults["lost message"] += found
        return found

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action))

    def plan_faults(self, until_s: float) -> None:
        for _ in range(self.rng.randint(1, 8)):
            fault = self.rng.choice([self.pause, self.crash_owner, self.crash, self.lose_state, self.stop_authority])
            self.at(self.rng.uniform(0.0, until_s), fault)

    def pause(self) -> None:
        self.faults["pause of a gateway"] += 1
        self.rng.choice(self.contenders).paused_until = self.now + self.rng.uniform(0.1, 3 * TTL_S)

    def crash(self) -> None:
        self.faults["crash of a gateway"] += 1
        self._replace(self.rng.randrange(len(self.contenders)))

    def crash_owner(self) -> None:
        for number, one in enumerate(self.contenders):
            if one.may_send():
                self.faults["crash of the owner"] += 1
                self._replace(number)

    def _replace(self, number: int) -> None:
        self.contenders[number].is_dead = True
        self._count += 1
        self.contenders[number] = Contender(self, f"gateway-{number}-{self._count}")

    def lose_state(self) -> None:
        self.faults["loss of the authority's state"] += 1
        self.authority.lose_state(self.authority_ms)

    def stop_authority(self) -> None:
        self.faults["stop of the authority"] += 1
        self.is_down = True
        self.at(self.now + self.rng.uniform(0.2, 3 * TTL_S), self._start_authority)

    def _start_authority(self) -> None:
        self.is_down = False
        self.lose_state()

    def owned(self, owner: Owner) -> None:
        """No two gateways ever have the same epoch."""
        if owner.epoch:
            assert self.epochs.setdefault(owner.epoch, owner.gateway) == owner.gateway, f"epoch {owner.epoch} twice"

    def _look(self) -> None:
        """Check also while nothing happens."""
        self.at(self.now + 0.05, self._look)

    def check(self) -> None:
        owners = [one.lease for one in self.contenders if one.may_send()]
        assert len(owners) <= 1, f"{[one.gateway for one in owners]} send at the same time"
        self.sends += len(owners)
        if owners:
            if self._free_since is not None:
                self.gaps.append(self.now - self._free_since)
            self._free_since = None
        elif self._free_since is None:
            self._free_since = self.now

    def play(self, until_s: float = 40.0) -> None:
        while self._events and self._events[0][0] < until_s:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self.check()
