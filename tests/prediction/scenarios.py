"""Queues that a gateway meets: steady, heavy-tailed, bursty, stepped, shrinking, and lanes above each other."""

import random
from collections.abc import Callable

from inferry.domain.lanes import Lane
from prediction.queue_simulation import Outcome, bursts, decode_bound, jobs, poisson, prefill_bound, simulate

# A decode-bound job holds its slot for about 1.95 s, a prefill-bound one for about 0.23 s.
DECODE_S = 1.95
PREFILL_S = 0.23


def steady(rng: random.Random) -> list[Outcome]:
    """Eight slots, 90 % used."""
    return simulate(jobs(rng, poisson(rng, lambda _: 0.9 * 8 / DECODE_S, 800)), decode_bound, lambda _: 8)


def heavy_tail(rng: random.Random) -> list[Outcome]:
    """Outputs that differ by orders of magnitude, badly predicted."""
    arrivals = jobs(rng, poisson(rng, lambda _: 0.85 * 8 / 2.64, 1100), output_sigma=1.05, guess_sigma=0.8)
    return simulate(arrivals, decode_bound, lambda _: 8)


def one_slot(rng: random.Random) -> list[Outcome]:
    """One prefill at a time, 85 % used: the prompt is what counts."""
    return simulate(jobs(rng, poisson(rng, lambda _: 0.85 / PREFILL_S, 800)), prefill_bound, lambda _: 1)


def bursty(rng: random.Random) -> list[Outcome]:
    """An agent fans out to some forty calls at once, every twelve seconds."""
    return simulate(jobs(rng, bursts(rng, 12.0, 40, 800)), decode_bound, lambda _: 16)


def load_steps(rng: random.Random) -> list[Outcome]:
    """Half load, then a third too much for a minute, and again."""

    def rate(now: float) -> float:
        return (1.3 if now % 240 > 180 else 0.5) * 16 / DECODE_S

    return simulate(jobs(rng, poisson(rng, rate, 720)), decode_bound, lambda _: 16)


def lost_worker(rng: random.Random) -> list[Outcome]:
    """Half of the slots go away for a minute at 70 % load, and come back."""
    arrivals = jobs(rng, poisson(rng, lambda _: 0.7 * 16 / DECODE_S, 720))
    return simulate(arrivals, decode_bound, lambda now: 8 if now % 240 > 180 else 16)


def three_lanes(rng: random.Random) -> list[Outcome]:
    """Live, standard and batch work in equal parts, 90 % used together."""
    arrivals = jobs(rng, poisson(rng, lambda _: 0.9 * 16 / DECODE_S, 600), lanes=tuple(Lane))
    return simulate(arrivals, decode_bound, lambda _: 16)


SCENARIOS: dict[str, Callable[[random.Random], list[Outcome]]] = {
    one.__name__: one for one in (steady, heavy_tail, one_slot, bursty, load_steps, lost_worker, three_lanes)
}
