"""Figures as people read them, in the terminal and on the page."""

NONE = "–"  # noqa: RUF001 - what a person reads where there is no number


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
    """In whatever the price was given in, with as many digits as say something."""
    if value is None:
        return NONE
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"
