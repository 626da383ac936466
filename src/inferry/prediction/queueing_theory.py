"""Queueing theory as pure functions: what `inferry plan` prints.

Rates are per second, times in seconds. All assume a steady state: a rate that holds long enough to matter. For bursts
and steps use the simulator.
"""

from math import ceil, inf, log

from msgspec import Struct

MAX_WORKERS = 100_000


def utilisation(rate: float, service_s: float, workers: int = 1) -> float:
    """The part of the time a worker is busy: rate · service / workers."""
    return rate * service_s / workers


def erlang_c(workers: int, offered: float) -> float:
    """The probability that a job must wait at all, in M/M/c with `offered` = rate · service erlangs.

    C = B / (1 - u (1 - B)), with u = offered / c and B the Erlang B recursion B(n) = a B(n-1) / (n + a B(n-1)).
    Poisson arrivals, exponential service, one queue, no job leaves it unserved. At full load and above it is 1.
    """
    if offered <= 0:
        return 0.0
    if offered >= workers:
        return 1.0
    blocked = 1.0
    for n in range(1, workers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / workers * (1 - blocked))


def mmc_wait(rate: float, service_s: float, workers: int = 1) -> float:
    """Mean wait in M/M/c: C · service / (c (1 - u)). Infinite from full load on."""
    spare = workers - rate * service_s
    return inf if spare <= 0 else erlang_c(workers, rate * service_s) * service_s / spare


def ggc_wait(
    rate: float, service_s: float, workers: int = 1, arrival_cv: float = 1.0, service_cv: float = 1.0
) -> float:
    """Allen and Cunneen's mean wait in G/G/c: M/M/c's times (arrival cv² + service cv²) / 2.

    Exact for M/M/c and M/G/1, good to some ten percent for busy queues, worse below half load and for arrivals that
    depend on each other: agents that fan out have an arrival cv well above 1.
    """
    return mmc_wait(rate, service_s, workers) * (arrival_cv**2 + service_cv**2) / 2


def wait_quantile(
    level: float,
    rate: float,
    service_s: float,
    workers: int = 1,
    arrival_cv: float = 1.0,
    service_cv: float = 1.0,
) -> float:
    """The wait that `level` of jobs stay within: max(0, (W / C) · ln(C / (1 - level))), W the G/G/c mean.

    Assumes that positive waits are exponential, which is exact for M/M/c and accurate in heavy traffic.
    """
    mean = ggc_wait(rate, service_s, workers, arrival_cv, service_cv)
    must_wait = erlang_c(workers, rate * service_s)
    if mean in (0.0, inf) or must_wait <= 1 - level:
        return mean if mean == inf else 0.0
    return mean / must_wait * log(must_wait / (1 - level))


def utilisation_for_wait(
    wait_per_service: float, workers: int = 1, arrival_cv: float = 1.0, service_cv: float = 1.0
) -> float:
    """The utilisation at which the mean G/G/c wait is the given multiple of the service time, by bisection.

    The usual target of 70 to 80 % comes from here: with one worker and cv 1 the wait is 2.3 services at 70 %, 4 at
    80 %, 9 at 90 % and 19 at 95 %. The curve bends there, and a load 10 % above the forecast is still survived.
    Many workers behind one queue can be run hotter.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if ggc_wait(middle * workers, 1.0, workers, arrival_cv, service_cv) <= wait_per_service:
            low = middle
        else:
            high = middle
    return low


def workers_needed(
    rate: float,
    service_s: float,
    target_s: float,
    *,
    level: float = 0.9,
    arrival_cv: float = 1.0,
    service_cv: float = 1.0,
    max_utilisation: float = 0.8,
) -> int:
    """The fewest workers (or slots) with which `level` of jobs wait no longer than the target.

    Never above `max_utilisation`, even where the target would allow it, as a margin for forecast errors.
    """
    workers = max(1, ceil(rate * service_s / max_utilisation - 1e-9))
    while wait_quantile(level, rate, service_s, workers, arrival_cv, service_cv) > target_s:
        workers += 1
        if workers > MAX_WORKERS:
            raise ValueError(f"more than {MAX_WORKERS} workers would be needed")
    return workers


# -- batches: a pass over b jobs takes fixed + b · each ----------------------------------------------------------------


class BatchChoice(Struct, frozen=True, gc=False):
    """A batch size and what it means. `fill_s` is how long its first job waits for the last; `mean_s` and `worst_s` are
    from arrival to the end of the pass, for the average job and for the first of a batch."""

    size: int
    fill_s: float
    queue_s: float
    pass_s: float
    utilisation: float
    mean_s: float
    worst_s: float


def fill_wait(rate: float, size: int) -> float:
    """How long to hold the first job so that on average `size` have come: (size - 1) / rate."""
    return (size - 1) / rate


def batch(rate: float, size: int, fixed_s: float, each_s: float) -> BatchChoice:
    """A server that takes jobs in batches of exactly `size`.

    Batches are complete at rate / size with gaps that are sums of `size` exponential ones (cv² = 1 / size); a pass
    takes the same time each (cv 0); so they queue for u / (1 - u) · pass · (1 / size) / 2 by Allen and Cunneen. An
    average job waits for half of the others.
    """
    fill, taken = fill_wait(rate, size), fixed_s + size * each_s
    load = rate / size * taken
    queue = inf if load >= 1 else load / (1 - load) * taken / size / 2
    return BatchChoice(size, fill, queue, taken, load, fill / 2 + queue + taken, fill + queue + taken)


def best_batch(rate: float, fixed_s: float, each_s: float, *, max_size: int = 1024) -> BatchChoice | None:
    """The batch size with the least mean latency, or None if no size up to `max_size` keeps up with the rate.

    Filling costs (b - 1) / 2 rate, which grows with b; queueing falls as the fixed part is shared. Small where there
    is time to spare, and just above rate · fixed / (1 - rate · each) where there is not.
    """
    choices = [
        choice for size in range(1, max_size + 1) if (choice := batch(rate, size, fixed_s, each_s)).utilisation < 1
    ]
    return min(choices, key=lambda choice: choice.mean_s, default=None)


def largest_batch(
    rate: float, fixed_s: float, each_s: float, target_s: float, *, max_size: int = 1024
) -> BatchChoice | None:
    """The largest batch whose first job completes within the target: the cheapest that attains it.

    None if no size does: passes take too long, or cannot keep up with the rate.
    """
    for size in range(max_size, 0, -1):
        choice = batch(rate, size, fixed_s, each_s)
        if choice.utilisation < 1 and choice.worst_s <= target_s:
            return choice
    return None
