"""Several gateways with one run ceiling in virtual time, by seed: the real quota gates, grants and authority.

A seed decides message delays and losses, pauses and crashes of gateways, losses of the authority's state, drift of
clocks, and the calls. After every event the world checks what was really used, which the ledger may not know.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from admission.builders import NOON, a_call, a_caller
from inferry.admission.grant_protocol import Exchange, GrantProtocol, ReadHoldings, Rebuild, Step, WriteHoldings
from inferry.admission.grants import GrantTracker
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.cluster.limit_authority import InMemoryAuthority
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import Price
from inferry.domain.shared_limits import Exchanged
from inferry.domain.streams import Usage
from inferry.domain.values import replace
from simulation.lease_database import DAY_TOKENS, NANOS, TOKENS, Content, Database

TTL_S = 3.0
DRIFT = 0.02
"""A clock runs at most this fraction faster or slower than true time."""
PRICES = {"m": Price(input=2.0, output=10.0)}


class Call:
    def __init__(self, job: InferenceJob, permit: Permit, target: int) -> None:
        self.job, self.permit, self.target = job, permit, target
        self.written = 0
        self.batch = permit.watermark_batch
        self.is_over = False


class SimulatedGateway:
    """One process, until it is killed. Its clock runs at its own rate; while it is paused, nothing in it happens."""

    def __init__(self, world: "LeaseWorld", name: str) -> None:
        self.world, self.name = world, name
        self.rate = 1 + world.rng.uniform(-DRIFT, DRIFT)
        self.tracker = GrantTracker()
        self.gate = QuotaGate(PRICES, watermarks=self.tracker, lease_tokens=world.lease_tokens)
        self.gate.restore(world.database.spending(), self.now)
        self.protocol = GrantProtocol(self.tracker, TTL_S)
        self.calls: list[Call] = []
        self.is_dead = False
        self.paused_until = 0.0
        self.recorded = self.settled = 0
        self._step: Step | None = None
        self._attempt = 0
        self._tick()

    @property
    def now(self) -> float:
        return self.world.now * self.rate

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.at(self.world.now + delay_s, partial(self._run, action))

    def _run(self, action: Callable[[], None]) -> None:
        if self.is_dead:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, partial(self._run, action))
            return
        self.protocol.check_validity(self.now)
        action()

    def _tick(self) -> None:
        self.tracker.sweep(self.recorded, self.settled)
        self._advance()
        self.later(0.5, self._tick)

    # -- the protocol ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Perform the next step, unless one is under way."""
        if self._step is not None:
            return
        self._step = self.protocol.next_step(self.now)
        if self._step is not None:
            self._send(self._step)

    def _send(self, step: Step) -> None:
        self._attempt += 1
        attempt, sent_at = self._attempt, self.now
        self.later(2.0 if isinstance(step, Rebuild) else 0.4, partial(self._retry, attempt))
        if self.world.is_lost():
            return
        self.world.at(self.world.now + self.world.delay_s(), partial(self._arrive, step, attempt, sent_at))

    def _arrive(self, step: Step, attempt: int, sent_at: float) -> None:
        """The request is at the authority or the database: also where its sender is dead or paused."""
        world = self.world
        report: Callable[[], None]
        match step:
            case Exchange(number, generation, asks):
                if world.is_authority_down:
                    return
                found = world.authority.exchange(self.name, number, generation, asks, world.authority_ms)
                report = partial(self._exchanged, found, sent_at)
            case WriteHoldings(generation, amounts):
                report = partial(self._written, world.database.write(self.name, generation, amounts))
            case ReadHoldings():
                report = partial(self.protocol.read, *world.database.read(self.name))
            case Rebuild():
                if world.is_authority_down:
                    return
                content, started_ms = world.database.begin_rebuild(), world.authority_starts
                world.at(world.now + world.delay_s(), partial(self._publish, content, started_ms, attempt))
                return
        if not world.is_lost():
            self.later(world.delay_s(), partial(self._report, attempt, report))

    def _publish(self, content: Content, starts: int, attempt: int) -> None:
        world = self.world
        if not world.is_authority_down and starts == world.authority_starts:
            world.authority.rebuild(*content, world.authority_ms)
            self.later(world.delay_s(), partial(self._report, attempt, self.protocol.rebuilt))

    def _exchanged(self, found: Exchanged, sent_at: float) -> None:
        self.protocol.exchanged(found, sent_at, self.now)

    def _written(self, generation: int) -> None:
        self.protocol.written(generation, self.now)

    def _report(self, attempt: int, report: Callable[[], None]) -> None:
        if attempt == self._attempt and self._step is not None:
            self._step = None
            report()
            self._answered()
            if self.protocol.is_waiting:
                self.later(0.1, self._advance)
            else:
                self._advance()

    def _retry(self, attempt: int) -> None:
        if attempt == self._attempt and self._step is not None:
            self._step = None
            self._advance()

    # -- calls -------------------------------------------------------------------------------------------------------

    def submit(self, job: InferenceJob, caller: Caller, target: int) -> None:
        try:
            permit = self.gate.admit(job, caller, ("root",), self.now, NOON + self.world.now)
        except GatewayError:
            self.world.ended(is_refused=True)
            return
        call = Call(job, permit, target)
        self.calls.append(call)
        if permit.watermark_batch:
            self.later(5.0, partial(self._time_out, call))
        else:
            self._begin(call)
        self._advance()

    def _answered(self) -> None:
        waiting = [one for one in self.calls if one.batch and one.batch <= self.tracker.written]
        uncovered = self.tracker.uncovered([one.permit for one in waiting])
        for number, call in enumerate(waiting):
            if number not in uncovered:
                self._begin(call)
            elif self.tracker.uncovered_error(call.permit) is not None:
                self._refuse(call)
            else:
                call.batch = self.tracker.written + 1

    def _begin(self, call: Call) -> None:
        call.batch = 0
        self.world.use(call.job.footprint.prompt.expected, call.permit)
        self.later(self.world.rng.uniform(0.001, 0.02), partial(self._token, call))

    def _token(self, call: Call) -> None:
        permit = call.permit
        if call.written + 8 >= permit.granted_tokens:
            self.gate.renew(permit, call.written)
            self._advance()
        if call.written >= min(call.target, permit.granted_tokens, permit.output_cap):
            self._end(call, Usage(call.job.footprint.prompt.expected, 0, call.written))
            return
        call.written += 1
        self.world.use(1, permit, is_output=True)
        self.later(self.world.rng.uniform(0.001, 0.02), partial(self._token, call))

    def _time_out(self, call: Call) -> None:
        if call.batch and not call.is_over:
            self._refuse(call)

    def _refuse(self, call: Call) -> None:
        self._end(call, None)

    def _end(self, call: Call, usage: Usage | None) -> None:
        call.is_over = True
        self.calls.remove(call)
        cost = self.gate.settle(call.permit, usage, self.now, NOON + self.world.now)
        if usage is not None:
            self.recorded += 1
            self.later(self.world.rng.uniform(0.0, 0.3), partial(self._write_row, usage, cost or 0))
        self.world.ended(is_refused=usage is None)

    def _write_row(self, usage: Usage, nanos: int) -> None:
        self.world.database.tokens += usage.prompt_tokens + usage.output_tokens
        self.world.database.nanos += nanos
        self.settled += 1


class LeaseWorld:
    """`play` runs the seed's schedule up to a time: after 40 s nearly all have ended, and every gateway is idle."""

    def __init__(
        self,
        seed: int,
        *,
        gateways: int = 3,
        agents: int = 12,
        calls: int = 3,
        faults: bool = True,
        ceiling_share: float | None = None,
    ) -> None:
        self.rng = random.Random(f"{seed}/leases")
        rng = self.rng
        self.now = 0.0
        self.is_lossy = faults and rng.random() < 0.7
        self._slow = faults and rng.random() < 0.3
        self.lease_tokens = rng.choice([8, 16, 64])
        self.database = Database()
        self.authority = InMemoryAuthority(int(TTL_S * 1000))
        self.authority_starts = 0
        self.is_authority_down = False
        self._authority_rate = 1 + rng.uniform(-DRIFT, DRIFT)
        self.used_tokens = self.used_nanos = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.faults: Counter[str] = Counter()
        self.refused = self.done = self.crashed = 0
        demand = agents * calls * 70
        self.ceiling = int(demand * (ceiling_share or rng.choice([0.1, 0.4, 0.8, 2.0])))
        money = rng.random() < 0.3
        self.nano_ceiling = self.ceiling * 8_000 if money else None
        self.caller = a_caller(
            run_token_ceiling=self.ceiling,
            day_token_ceiling=int(self.ceiling * 1.5),
            run_money_ceiling=None if self.nano_ceiling is None else self.nano_ceiling / 1e9,
        )
        self.gateways = [SimulatedGateway(self, f"gateway-{number}") for number in range(gateways)]
        self._agents = {f"agent-{number}": calls for number in range(agents)}
        for agent in self._agents:
            self.at(rng.uniform(0.0, 2.0), partial(self._call, agent))
        if faults:
            self._plan_faults()

    def _plan_faults(self) -> None:
        for _ in range(self.rng.randint(0, 5)):
            fault = self.rng.choice([self._pause, self._crash, self._lose_state, self._stop_authority])
            self.at(self.rng.uniform(0.0, 8.0), fault)

    @property
    def authority_ms(self) -> int:
        return int(self.now * self._authority_rate * 1000)

    def delay_s(self) -> float:
        return self.rng.uniform(0.0002, 0.3 if self._slow else 0.005)

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action))

    # -- faults ------------------------------------------------------------------------------------------------------

    def is_lost(self) -> bool:
        """Whether a message is lost."""
        found = self.is_lossy and self.rng.random() < 0.1
        self.faults["lost message"] += found
        return found

    def _pause(self) -> None:
        self.faults["pause of a gateway"] += 1
        one = self.rng.choice(self.gateways)
        one.paused_until = self.now + self.rng.uniform(0.1, 2.5 * TTL_S)

    def _crash(self) -> None:
        number = self.rng.randrange(len(self.gateways))
        self.crashed += 1
        self.faults["crash of a gateway"] += 1
        dead = self.gateways[number]
        dead.is_dead = True
        for call in dead.calls:
            self._next(call.job.step_id)
        self.gateways[number] = SimulatedGateway(self, f"gateway-{number}-{self.crashed}")

    def _lose_state(self) -> None:
        self.faults["loss of the authority's state"] += 1
        self.authority_starts += 1
        self.authority.lose_state()

    def _stop_authority(self) -> None:
        self.faults["stop of the authority"] += 1
        self.is_authority_down = True
        self.at(self.now + self.rng.uniform(0.2, 2 * TTL_S), self._start_authority)

    def _start_authority(self) -> None:
        self.is_authority_down = False
        self._lose_state()

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, agent: str) -> None:
        rng = self.rng
        if not self._agents[agent]:
            return
        self._agents[agent] -= 1
        gateway = rng.choice(self.gateways)
        target = min(120, int(rng.expovariate(1 / 40)) + 1)
        self._count += 1
        job = a_call(rng.randint(1, 50), rng.choice([target, 200]), run="root")
        job = replace(job, job_id=f"job-{self._count}", step_id=agent)
        gateway.later(0.0, partial(gateway.submit, job, self.caller, target))
        if rng.random() < 0.5:
            self.at(self.now + rng.uniform(0.0, 3.0), partial(self._call, agent))

    def ended(self, *, is_refused: bool) -> None:
        self.refused += is_refused
        self.done += not is_refused
        for agent, left in self._agents.items():
            if left:
                self._next(agent)
                return

    def _next(self, agent: str) -> None:
        self.at(self.now + self.rng.uniform(0.01, 0.5), partial(self._call, agent))

    # -- laws --------------------------------------------------------------------------------------------------------

    def use(self, tokens: int, permit: Permit, *, is_output: bool = False) -> None:
        """An engine has used tokens: what counts, whatever the ledger gets to know."""
        self.used_tokens += tokens
        self.used_nanos += tokens * (10_000 if is_output else 2_000)

    def check(self) -> None:
        leased = sum(self._leased(one) for one in self.gateways)
        used = self.used_tokens + leased
        assert used <= self.ceiling, f"{self.used_tokens} used and {leased} leased exceed {self.ceiling}"
        assert self.nano_ceiling is None or self.used_nanos <= self.nano_ceiling
        settled, held = self.authority.totals(TOKENS)
        for one in self.gateways:
            if not one.is_dead and one.protocol.generation == self.authority.generation == self.database.generation:
                assert self.used_tokens <= settled + held, "the authority counts less than was used"

    def _leased(self, gateway: SimulatedGateway) -> int:
        """What running calls may still use. Calls that wait for a grant use nothing."""
        running = [call for call in gateway.calls if not call.batch]
        return sum(min(call.permit.granted_tokens, call.permit.output_cap) - call.written for call in running)

    def held_by_live(self) -> int:
        """Tokens and nanos that the authority counts as held by gateways that are alive."""
        generation, live = self.authority.generation, [one.name for one in self.gateways]
        assert all(one.protocol.generation == generation for one in self.gateways)
        return sum(self.authority.held_by(account, name) for account in (TOKENS, NANOS, DAY_TOKENS) for name in live)

    def play(self, until_s: float = 40.0) -> None:
        while self._events and self._events[0][0] < until_s:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self.check()
