"""Two versions compared by the runs of each, with intervals that stay valid however often one looks.

The unit is the run, because a run keeps its version: calls of one run resemble each other, and an interval over calls
would be too narrow. A measure is a ratio of two sums over runs; its variance is that of the linearised ratio.

The intervals are a confidence sequence (the normal mixture of Robbins, as in the mixture sequential probability ratio
test). With probability 1 - `error` the true difference lies in all intervals of a trial, not only in one of them. So a
decision may be made at any look.
"""

from collections.abc import Callable, Iterable, Sequence
from math import exp, inf, log, sqrt

from inferry.domain.settings_versions import Measure, RunTally

ATTAINMENT, ERRORS, COST, RUN_COST, THROUGHPUT = "attainment", "errors", "cost", "run_cost", "throughput"
SCALES = {ATTAINMENT: 0.05, ERRORS: 0.02, COST: 0.1, RUN_COST: 0.1, THROUGHPUT: 0.1}
"""Size of a difference at which the intervals are narrowest (the mixture's standard deviation): parts of 1 for the
first two, logarithms of a ratio for the others."""


Values = Callable[[RunTally], tuple[float, float]]
"""Numerator and denominator of a run."""


def compare(
    tallies: Iterable[RunTally], active: int, candidate: int, error: float, *, per_run: bool = False
) -> list[Measure]:
    """All measures of which both versions have at least two runs. `error` is for each measure.

    `per_run`: cost is that of a run, not of an output token. Versions that call other models write other tokens: an
    answer of a small model that is not used makes tokens cheaper and the call dearer.
    """
    tallies = list(tallies)
    priced = any(tally.cost_nanos for tally in tallies)
    lanes = sorted({tally.lane for tally in tallies})
    found = [_share(ATTAINMENT, lane, _attained, tallies, active, candidate, error) for lane in lanes]
    found.append(_share(ERRORS, None, _failed, tallies, active, candidate, error))
    cost = _money if priced else _gpu_seconds
    found.append(_rate(RUN_COST if per_run else COST, cost, tallies, active, candidate, error))
    found.append(_rate(THROUGHPUT, _token_rate, tallies, active, candidate, error))
    return [one for one in found if one is not None]


def _attained(tally: RunTally) -> tuple[float, float]:
    return tally.attained, tally.judged


def _failed(tally: RunTally) -> tuple[float, float]:
    return tally.failed, tally.calls


def _money(tally: RunTally) -> tuple[float, float]:
    return tally.cost_nanos / 1e6, tally.output_tokens


def _gpu_seconds(tally: RunTally) -> tuple[float, float]:
    return tally.gpu_seconds * 1000, tally.output_tokens


def _token_rate(tally: RunTally) -> tuple[float, float]:
    return tally.output_tokens, tally.seconds


def _share(
    name: str, lane: str | None, values: Values, tallies: Sequence[RunTally], active: int, candidate: int, error: float
) -> Measure | None:
    """The difference of two shares. One run with all and one without any are added to each version (Agresti and
    Caffo), so that a share of 0 or 1 has a variance."""
    arms = [_pairs(tallies, version, lane, values) for version in (active, candidate)]
    if any(len(pairs) < 2 for pairs in arms):
        return None
    adjusted = [_with_prior(pairs) for pairs in arms]
    (before, before_variance), (after, after_variance) = (_ratio(pairs) for pairs in adjusted)
    difference = after - before
    radius = confidence_radius(before_variance + after_variance, SCALES[name], error)
    return Measure(
        name=name,
        lane=lane,
        active=_ratio(arms[0])[0],
        candidate=_ratio(arms[1])[0],
        difference=difference,
        low=max(-1.0, difference - radius),
        high=min(1.0, difference + radius),
        active_runs=len(arms[0]),
        candidate_runs=len(arms[1]),
    )


def _rate(
    name: str, values: Values, tallies: Sequence[RunTally], active: int, candidate: int, error: float
) -> Measure | None:
    """The ratio of two rates, compared by logarithms."""
    arms = [_pairs(tallies, version, None, values) for version in (active, candidate)]
    if name == RUN_COST:
        arms = [[(over / 1000, 1.0) for over, _ in pairs] for pairs in arms]
    if any(len(pairs) < 2 for pairs in arms):
        return None
    (before, before_variance), (after, after_variance) = (_ratio(pairs) for pairs in arms)
    if before <= 0 or after <= 0:
        return None
    difference = log(after / before)
    variance = before_variance / before**2 + after_variance / after**2
    radius = confidence_radius(variance, SCALES[name], error)
    return Measure(
        name=name,
        lane=None,
        active=before,
        candidate=after,
        difference=exp(difference) - 1,
        low=exp(difference - radius) - 1,
        high=exp(min(difference + radius, 50.0)) - 1,
        active_runs=len(arms[0]),
        candidate_runs=len(arms[1]),
    )


def _pairs(tallies: Sequence[RunTally], version: int, lane: str | None, values: Values) -> list[tuple[float, float]]:
    """Numerator and denominator of every run of a version that has the latter."""
    runs: dict[str, tuple[float, float]] = {}
    for tally in tallies:
        if tally.version == version and lane in (None, tally.lane):
            over, under = values(tally)
            before = runs.get(tally.run, (0.0, 0.0))
            runs[tally.run] = (before[0] + over, before[1] + under)
    return [pair for pair in runs.values() if pair[1] > 0]


def _with_prior(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    mean = sum(pair[1] for pair in pairs) / len(pairs)
    return [*pairs, (mean, mean), (0.0, mean)]


def _ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The ratio of the sums, and its variance."""
    count, total = len(pairs), sum(pair[1] for pair in pairs)
    ratio = sum(pair[0] for pair in pairs) / total
    squares = sum((over - ratio * under) ** 2 for over, under in pairs)
    return ratio, count / (count - 1) * squares / total**2


def confidence_radius(variance: float, scale: float, error: float) -> float:
    """Half the width of the interval at this look. All intervals together hold with probability 1 - `error`."""
    if variance <= 0:
        return inf if error <= 0 else 0.0
    mixed = variance + scale**2
    return sqrt(variance * mixed / scale**2 * (log(mixed / variance) + 2 * log(1 / error)))
