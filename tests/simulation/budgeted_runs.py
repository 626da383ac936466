"""Sub-agents of one run over workers that die, in virtual time: the real scheduler, attempts and gate, by seed."""

import random
from collections.abc import Sequence

from msgspec import Struct

from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.domain.callers import Caller
from inferry.domain.errors import ClientClosed, RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.prices import Price
from inferry.domain.streams import Done, End, Failed, FinishReason, Usage
from inferry.domain.tenants import ApiKey, Limits, Tenant
from inferry.domain.values import replace
from support.builders import a_job, a_policy, a_view
from support.fault_simulation import FaultSimulation
from support.faults import Faults, JobFault, JobFaultKind, WorkerFault, WorkerFaultKind

AGENTS = 64
WORKERS = 4
WALL = 1_773_619_190.0
"""Ten seconds before midnight, UTC."""
PRICES = {"m": Price(input=0.5, cached_input=0.1, output=2.0)}
LANES = {lane: a_policy() for lane in Lane}
_LOST = (JobFaultKind.RESET, JobFaultKind.SILENCE, JobFaultKind.DISCONNECT)


class Agent(Struct):
    """One sub-agent: its run and those above it, and the calls it has still to make, each with its trouble if any."""

    lineage: tuple[str, ...]
    calls: list[tuple[InferenceJob, int, JobFault | None]]


class SubAgents:
    """What a seed stands for: agents three deep, what each asks for and gets, and what goes wrong."""

    def __init__(self, seed: int, *, steps: int = 2, trouble: bool = True, ceiling_share: float | None = None) -> None:
        rng = random.Random(f"{seed}/sub-agents")
        self.agents: list[Agent] = []
        self.demand = 0
        for number in range(AGENTS):
            lineage = (f"agent-{number}", f"group-{number % 8}", "root") if number else ("root",)
            calls = []
            for step in range(rng.randint(1, 2 * steps - 1)):
                prompt, output = rng.randint(1, 60), min(120, int(rng.expovariate(1 / 25)) + 1)
                fault = None
                if trouble and rng.random() < 0.3:
                    fault = JobFault(rng.choice(_LOST), rng.randint(0, output), rng.uniform(0, 0.3))
                job = a_job(
                    f"{number}-{step}",
                    tokens=prompt,
                    output=output,
                    run_id=lineage[0],
                    lane=rng.choice(list(Lane)),
                    at=rng.uniform(0, 0.1 if step else 0.002),
                    stream=True,
                    resume=rng.choice([ResumeMode.CONTINUE, ResumeMode.RESTART]),
                )
                job = replace(job, token_budget=rng.choice([output, 200, 4_000]))
                calls.append((job, output, fault))
                self.demand += prompt + output
            self.agents.append(Agent(lineage, calls))
        self.workers: tuple[WorkerFault, ...] = ()
        if trouble:
            self.workers = tuple(
                WorkerFault(
                    rng.choice([WorkerFaultKind.DEATH, WorkerFaultKind.DEATH, WorkerFaultKind.STALL]),
                    rng.randrange(WORKERS),
                    rng.uniform(0, 0.6),
                    rng.uniform(0.01, 0.3),
                )
                for _ in range(rng.randint(1, 6))
            )
        share = rng.choice([0.1, 0.4, 0.7, 0.95, 2.0]) if ceiling_share is None else ceiling_share
        self.ceiling = max(1, int(self.demand * share))
        self.lease_tokens = rng.choice([8, 16, 64, 256])
        self.in_money = rng.random() < 0.3
        self.by_day = rng.random() < 0.3

    def limits(self) -> Limits:
        if self.in_money:  # what so many tokens cost, about
            return Limits(run_money_ceiling=self.ceiling * 1.2e-6)
        return Limits(run_token_ceiling=self.ceiling)

    def caller(self, limits: Limits | None = None) -> Caller:
        key = Limits(day_token_ceiling=self.ceiling) if self.by_day else Limits()
        api_key = ApiKey(key_id="k", tenant="a", secret_hash=b"", limits=key)
        return Caller(Tenant(name="a", limits=self.limits() if limits is None else limits), api_key)


class BudgetedSimulation(FaultSimulation):
    """The trial with a gate before it, driven as dispatch drives it. Agents go on when a call of theirs has ended."""

    def __init__(self, workload: SubAgents, caller: Caller, *, lease_tokens: int | None = None) -> None:
        self.gate = QuotaGate(PRICES, lease_tokens=lease_tokens or workload.lease_tokens)
        self.caller = caller
        self.permits: dict[str, Permit] = {}
        self.admitted: list[Permit] = []
        self.charged_tokens = self.charged_nanos = 0
        self.refusals = self.stops = self.written = self.ended_jobs = 0
        self.in_flight = self.most_in_flight = 0
        self.bound_at: float | None = None
        self.written_at: list[float] = []
        self._agents = {agent.lineage[0]: agent for agent in workload.agents}
        self._prompts = {
            job.job_id: job.footprint.prompt.expected for agent in workload.agents for job, _, _ in agent.calls
        }
        views = [a_view(str(number), sequences=24, prefill_tokens=2_000) for number in range(WORKERS)]
        super().__init__(LANES, views, (), Faults(workload.workers))
        for agent in workload.agents:
            self._next_call(agent, 0.0)

    # Agents.

    def _next_call(self, agent: Agent, now: float) -> None:
        if agent.calls:
            job, output, fault = agent.calls.pop(0)
            at = now + job.arrived_at
            self.events.at(at, self._arrive, (replace(job, arrived_at=at), output, fault))

    def _arrive(self, now: float, argument: tuple[InferenceJob, int, JobFault | None]) -> None:
        job, target_tokens, fault = argument
        agent = self._agents[job.run_id]
        try:
            permit = self.gate.admit(job, self.caller, agent.lineage, now, WALL + now)
        except (RunBudgetExhausted, TenantBudgetExhausted):
            self.refusals += 1
            self._bound(now)
            self._next_call(agent, now + 0.05)
            return
        self.permits[job.job_id] = permit
        self.admitted.append(permit)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if permit.output_cap < job.token_budget:
            job = replace(job, token_budget=permit.output_cap)
        self.holds(permit)
        super()._arrive(now, (job, min(target_tokens, permit.output_cap), fault))

    # Workers.

    def _token(self, now: float, message: tuple[str, int]) -> None:
        open_job = self._current_attempt(*message)
        if open_job is not None and self._stalled_until[open_job.worker or 0] <= now:
            permit, written = self.permits[message[0]], len(open_job.delivered)
            if written + 4 >= permit.granted_tokens and written < permit.max_output:
                self.gate.renew(permit, written)
                self.holds(permit)
            if written >= permit.granted_tokens:
                stopped = self.gate.exhausted_error(permit)
                self.stops += 1
                self._bound(now)
                job = open_job.attempt.job
                usage = Usage(job.footprint.prompt.expected, 0, open_job.attempt.output_tokens)
                self._end(open_job, Done(job.job_id, FinishReason.LENGTH, usage, stopped=stopped), now)
                return
            before = written
            super()._token(now, message)
            if len(open_job.delivered) > before:
                self.written += 1
                self.written_at.append(now)
            return
        super()._token(now, message)

    # Ends.

    def _close(self, open_job, end: End, now: float) -> None:  # type: ignore[no-untyped-def]
        super()._close(open_job, end, now)
        job = open_job.attempt.job
        permit = self.permits.pop(job.job_id)
        written = len(open_job.delivered)
        was_client = isinstance(end, Done) or (isinstance(end, Failed) and isinstance(end.error, ClientClosed))
        usage = None
        if was_client and (written or isinstance(end, Done)):
            first = self._prompts[job.job_id]
            usage = Usage(first, first // 3, written)
            self.charged_tokens += first + written
        cost = self.gate.settle(permit, usage, now, WALL + now)
        self.charged_nanos += cost or 0
        self.holds(permit)
        self.in_flight -= 1
        self.ended_jobs += 1
        self._next_call(self._agents[job.run_id], now)

    # Laws.

    def holds(self, permit: Permit) -> None:
        for account in permit.leased_accounts:
            assert 0 <= account.spent_tokens <= account.committed_tokens <= account.token_ceiling
            assert 0 <= account.spent_nanos <= account.committed_nanos <= account.nano_ceiling

    def _bound(self, now: float) -> None:
        if self.bound_at is None:
            self.bound_at = now


def play(workload: SubAgents, caller: Caller | None = None, *, lease_tokens: int | None = None) -> BudgetedSimulation:
    fault_sim = BudgetedSimulation(workload, workload.caller() if caller is None else caller, lease_tokens=lease_tokens)
    fault_sim.run()
    return fault_sim


def tokens_until(times: Sequence[float], moment: float) -> int:
    return sum(at <= moment for at in times)
