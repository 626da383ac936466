"""Figures as text, in the terminal and on pages."""

NONE = "–"  # noqa: RUF001 - shown where there is no figure


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 0.0095:
        return f"{value * 1000:.1f} ms"
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def money(value: float | None) -> str:
    """In the currency of the price, with three significant digits below 1."""
    if value is None:
        return NONE
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def tick(value: float) -> str:
    """A mark on an axis of seconds."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1000:.4g} ms" if value < 1 else f"{value:,.4g} s"
