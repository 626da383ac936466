"""The smallest fleet that meets the SLO targets, by a search over simulations.

Attainment is not monotone in the number of workers: one more may place two long prompts side by side. A number of
workers is enough when it and the next larger one meet the target over all seeds, and the next smaller one does not.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from inferry.sim.report import Report

Simulate = Callable[[int, int], Report]
"""Number of workers and seed to the report."""


class NoFeasibleFleet(Exception):
    """The largest allowed fleet misses the target; `probes` has the figures."""

    def __init__(self, max_workers: int, probes: "Sequence[Probe]") -> None:
        super().__init__(f"{max_workers} workers do not meet the target")
        self.probes = probes


class Probe(Struct, frozen=True, kw_only=True):
    """One number of workers over some seeds. `attainment` is by lane, over the calls of all seeds together."""

    workers: int
    seeds: tuple[int, ...]
    attainment: dict[str, float]
    ttft_p95: dict[str, float | None]
    utilisation: float
    output_rate: float
    meets: bool


class Sizing(Struct, frozen=True, kw_only=True):
    """The result, with all probes in order."""

    workers: int
    target: float
    seeds: tuple[int, ...]
    probes: tuple[Probe, ...]

    @property
    def chosen(self) -> Probe:
        return next(one for one in reversed(self.probes) if (one.workers, one.seeds) == (self.workers, self.seeds))


def smallest_fleet(simulate: Simulate, seeds: Sequence[int], target: float, max_workers: int) -> Sizing:
    """Double and bisect with the first seed; then confirm the neighbouring numbers with all seeds."""
    search = _Search(simulate, tuple(seeds), target)
    high = 1
    low = 0
    while not search.meets(high, search.seeds[:1]):
        if high == max_workers:
            raise NoFeasibleFleet(max_workers, search.probes)
        low, high = high, min(2 * high, max_workers)
    while high - low > 1:
        middle = (low + high) // 2
        if search.meets(middle, search.seeds[:1]):
            high = middle
        else:
            low = middle
    workers = high
    while not search.is_enough(workers, max_workers):
        workers += 1
        if workers > max_workers:
            raise NoFeasibleFleet(max_workers, search.probes)
    while workers > 1 and search.is_enough(workers - 1, max_workers):
        workers -= 1
    return Sizing(workers=workers, target=target, seeds=search.seeds, probes=tuple(search.probes))


class _Search:
    """Simulates every (workers, seed) once and records the order of requests."""

    def __init__(self, simulate: Simulate, seeds: tuple[int, ...], target: float) -> None:
        self.seeds = seeds
        self.probes: list[Probe] = []
        self._simulate = simulate
        self._target = target
        self._reports: dict[tuple[int, int], Report] = {}
        self._known: dict[tuple[int, tuple[int, ...]], Probe] = {}

    def is_enough(self, workers: int, max_workers: int) -> bool:
        return self.meets(workers, self.seeds) and (workers == max_workers or self.meets(workers + 1, self.seeds))

    def meets(self, workers: int, seeds: tuple[int, ...]) -> bool:
        key = (workers, seeds)
        if key not in self._known:
            self._known[key] = _probe(workers, seeds, [self._report(workers, seed) for seed in seeds], self._target)
            self.probes.append(self._known[key])
        return self._known[key].meets

    def _report(self, workers: int, seed: int) -> Report:
        key = (workers, seed)
        if key not in self._reports:
            self._reports[key] = self._simulate(workers, seed)
        return self._reports[key]


def _probe(workers: int, seeds: tuple[int, ...], reports: Sequence[Report], target: float) -> Probe:
    lanes = sorted({name for one in reports for name in one.lanes})
    attainment, ttft_p95 = {}, {}
    for lane in lanes:
        lane_reports = [one.lanes[lane] for one in reports if lane in one.lanes]
        attainment[lane] = min(
            1.0, sum(one.attained for one in lane_reports) / max(1, sum(one.planned for one in lane_reports))
        )
        ttft_p95[lane] = max((one.ttft_p95 for one in lane_reports if one.ttft_p95 is not None), default=None)
    return Probe(
        workers=workers,
        seeds=seeds,
        attainment=attainment,
        ttft_p95=ttft_p95,
        utilisation=sum(one.utilisation for one in reports) / len(reports),
        output_rate=sum(one.output_rate for one in reports) / len(reports),
        meets=all(part >= target for part in attainment.values()),
    )
