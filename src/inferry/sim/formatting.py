"""Figures of a simulation's report as text."""

from inferry.report.formatting import count, seconds, share


def show(name: str, value: float) -> str:
    """A figure by the name of its field."""
    if name == "attainment":
        return share(value)
    if name == "utilisation":
        return f"{value:.0%}"
    if name == "fairness":
        return f"{value:.2f}"
    if name in ("goodput", "planned"):
        return count(value)
    return seconds(value)
