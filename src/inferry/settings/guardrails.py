"""Whether a version that is tried, or was applied, is rolled back. Pure: time is an argument.

The rule: a measure breaches its limit if the whole interval of its difference lies beyond the limit. There are
`TESTS` guarded measures, and each interval has the error `false_alarm / TESTS`, so the probability that any of them
breaches at any look of a trial, though the version is within all limits, is at most `false_alarm`.
"""

from collections.abc import Sequence

from inferry.domain.lanes import Lane
from inferry.domain.settings_versions import Guardrails, Measure
from inferry.settings.comparison import ATTAINMENT, COST, ERRORS, RUN_COST

TESTS = len(Lane) + 2
"""Attainment of every lane, errors, cost."""


def interval_error(guardrails: Guardrails) -> float:
    """The error of each interval."""
    return guardrails.false_alarm / TESTS


def rollback_reason(measures: Sequence[Measure], guardrails: Guardrails, started_at: float, now: float) -> str | None:
    """Why the trial must end now, for operators; None where it may go on."""
    reason = breach_reason(measures, guardrails)
    if reason is None and now - started_at >= guardrails.max_trial_s:
        return f"the trial was not ended within {guardrails.max_trial_s:g} s"
    return reason


def breach_reason(measures: Sequence[Measure], guardrails: Guardrails) -> str | None:
    """Which limit the version breaches, for operators; None where it breaches none."""
    for measure in measures:
        if min(measure.active_runs, measure.candidate_runs) >= guardrails.min_runs:
            reason = _breach(measure, guardrails)
            if reason is not None:
                return reason
    return None


def _breach(measure: Measure, guardrails: Guardrails) -> str | None:
    low, high = measure.low, measure.high
    if measure.name == ATTAINMENT and high < -guardrails.max_attainment_drop:
        return (
            f"attainment of {measure.lane} fell from {measure.active:.1%} to {measure.candidate:.1%} "
            f"(between {-high * 100:.1f} and {-low * 100:.1f} points)"
        )
    if measure.name == ERRORS and low > guardrails.max_error_rise:
        return (
            f"failed calls rose from {measure.active:.1%} to {measure.candidate:.1%} "
            f"(between {low * 100:.1f} and {high * 100:.1f} points)"
        )
    if measure.name in (COST, RUN_COST) and low > guardrails.max_cost_rise:
        return f"cost per {'output token' if measure.name == COST else 'run'} rose by {low:.0%} to {high:.0%}"
    return None
