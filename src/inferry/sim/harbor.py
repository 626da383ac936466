"""Harbor: the Monday-morning burst of a ticket-triage fleet, by seed.

Agent runs arrive in webhook bursts for live tenants while a backlog of nightly batch jobs (digests) waits. Lengths,
arrivals, tool times and cancellations of a seed equal those of the load generator that recorded the runs on the H200.
Prompts have no tokens here, only named pieces that say which prefixes are shared.
"""

from collections.abc import Callable, Sequence
from random import Random

from inferry.domain.lanes import Lane
from inferry.sim.calls import Run, Step
from inferry.sim.prompts import Piece, tail
from inferry.sim.rng import named_rng, seeded_rng

TENANTS: Sequence[tuple[str, Lane, int]] = (
    ("acme", Lane.P0, 3),
    ("globex", Lane.P0, 1),
    ("initech", Lane.P1, 4),
    ("hooli", Lane.P1, 3),
    ("umbrella", Lane.P1, 2),
)
_WEIGHTS = [weight for *_, weight in TENANTS]
_SIMPLE_STEPS = (("classify", 600, 16), ("draft", 1200, 160), ("policy", 900, 24), ("escalate", 1500, 64))
MAX_CONTEXT = 16_000


def harbor(
    seed: int = 7,
    *,
    seconds: float = 60.0,
    scale: float = 1.0,
    digests: int = 300,
    max_context: int = MAX_CONTEXT,
) -> list[Run]:
    """About 6.5 runs per second of three to eight steps, 3 % of them cancelled, and the batch jobs."""
    arrive, shape = named_rng(seed, "arrive"), named_rng(seed, "shape")
    new_segment = _segments()
    system = {tenant: new_segment(_clamp(shape.lognormvariate(7.2, 0.5), 400, 4000)) for tenant, *_ in TENANTS}
    policy = {tenant: new_segment(_clamp(shape.lognormvariate(6.9, 0.3), 400, 2000)) for tenant, *_ in TENANTS}
    times = _arrivals(arrive, seconds, scale)
    runs = [
        _ticket(number, at, shape, new_segment, system, policy, max_context) for number, at in enumerate(sorted(times))
    ]
    head = new_segment(400)
    for number in range(int(digests * scale)):
        body = (head, new_segment(_clamp(shape.lognormvariate(8.2, 0.5), 1500, max_context - 500)))
        at = arrive.uniform(0, 3)
        step = Step("digest", body, shape.randint(150, 400))
        runs.append(Run(run_id=f"digest-{number}", tenant="digest", lane=Lane.P2, at=at, steps=(step,)))
    return runs


def _arrivals(arrive: Random, seconds: float, scale: float) -> list[float]:
    """A low base rate, and a burst of webhooks within one second of every ten."""
    times: list[float] = []
    t = 0.0
    while (t := t + arrive.expovariate(2.6 * scale)) < seconds:
        times.append(t)
    for second in range(5, int(seconds), 10):
        times += [second + arrive.random() for _ in range(int(39 * scale))]
    return times


def _ticket(
    number: int,
    at: float,
    shape: Random,
    new_segment: Callable[[int], Piece],
    system: dict[str, Piece],
    policy: dict[str, Piece],
    max_context: int,
) -> Run:
    """One ticket: classify, plan, draft, check, escalate; the context grows by every answer and tool result."""
    tenant, lane, _ = shape.choices(TENANTS, _WEIGHTS)[0]
    context: tuple[Piece, ...] = (
        system[tenant],
        new_segment(_clamp(shape.lognormvariate(6.6, 0.9), 60, max_context // 2)),
    )
    steps: list[Step] = []

    def step(name: str, prompt: tuple[Piece, ...], output: int) -> None:
        tool_s = _clamp(shape.lognormvariate(-1.6, 1.0) * 1000, 20, 4000) / 1000
        steps.append(Step(name, tail(prompt, max_context), output, tool_s))

    def extended(output: int) -> tuple[Piece, ...]:
        return (*context, new_segment(output + _clamp(shape.lognormvariate(5.0, 0.8), 20, 2000)))

    output = shape.randint(4, 16)
    step("classify", (*context, new_segment(40)), output)
    context = extended(output)
    for _ in range(shape.choices([0, 1, 2, 3, 4], [3, 3, 2, 1, 1])[0]):
        output = shape.randint(30, 120)
        step("plan", (*context, new_segment(60)), output)
        context = extended(output)
    output = shape.randint(80, 300)
    step("draft", (*context, new_segment(120)), output)
    draft = new_segment(output)
    if shape.random() < 0.7:
        step("policy", (policy[tenant], draft, new_segment(30)), shape.randint(8, 32))
    if shape.random() < 0.2:
        step("escalate", (*context, draft, new_segment(50)), shape.randint(40, 120))
    abandon_after_s = shape.uniform(0.2, 4) if shape.random() < 0.03 else None
    return Run(
        run_id=f"run-{number}", tenant=tenant, lane=lane, at=at, steps=tuple(steps), cancel_after_s=abandon_after_s
    )


def simple_harbor(
    seed: int = 7, *, seconds: float = 60.0, scale: float = 1.0, digests: int = 300, vocab: int = 4000
) -> list[Run]:
    """The simpler workload: four steps of fixed lengths, batch jobs of 4,000 tokens, no cancellations.

    The original draws token ids from the same random stream, so they are drawn here and discarded.
    """
    rng = seeded_rng(seed)
    new_segment = _segments()

    def tokens(count: int) -> Piece:
        _skip_choices(rng, vocab - 100, count)
        return new_segment(count)

    tenants = [(tenant, lane) for tenant, lane, _ in TENANTS]
    system = {tenant: tokens(400) for tenant, _ in [*tenants, ("digest", Lane.P2)]}
    times: list[float] = []
    t = 0.0
    while t < seconds:
        t += rng.expovariate(4.0 * scale)
        times.append(t)
    for second in range(5, int(seconds), 10):
        times += [second + rng.random() for _ in range(int(60 * scale))]
    runs = []
    for number, at in enumerate(sorted(one for one in times if one < seconds)):
        tenant, lane = rng.choices(tenants, weights=_WEIGHTS)[0]
        ticket = tokens(1200)[0]
        steps = tuple(
            Step(name, (system[tenant], (ticket, 0, max(8, size - 400))), output, rng.uniform(0.05, 0.3))
            for name, size, output in _SIMPLE_STEPS
        )
        runs.append(Run(run_id=f"run-{number}", tenant=tenant, lane=lane, at=at, steps=steps))
    for number in range(int(digests * scale)):
        body = (system["digest"], tokens(3600))
        step = Step("digest", body, 300)
        runs.append(Run(run_id=f"digest-{number}", tenant="digest", lane=Lane.P2, at=rng.uniform(0, 3), steps=(step,)))
    return runs


def _skip_choices(rng: Random, below: int, count: int) -> None:
    """Advance the random stream as `count` calls of randrange would: draw bits until the value is in range."""
    bits = below.bit_length()
    getrandbits = rng.getrandbits
    for _ in range(count):
        while getrandbits(bits) >= below:
            pass


def _segments() -> Callable[[int], Piece]:
    """Makes prompt pieces that no other prompt shares."""
    last = 0

    def new_segment(count: int) -> Piece:
        nonlocal last
        last += 1
        return (last, 0, count)

    return new_segment


def _clamp(value: float, low: int, high: int) -> int:
    return int(max(low, min(high, value)))
