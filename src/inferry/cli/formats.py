"""Numbers, durations and names as the commands read and print them."""

import re

import typer
from rich.text import Text

from inferry.domain.keys import MAX_DURATION_S

EMPTY = "–"  # noqa: RUF001 - shown for a missing number
_MAX_SIZE = 4096
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 90s, 15m, 2h, 7d, 1w."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 90s, 15m, 2h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_lifetime(text: str) -> float:
    """Seconds of a duration for which a key or secret may be valid."""
    seconds = parse_duration(text)
    if seconds > MAX_DURATION_S:
        raise typer.BadParameter(f"{text!r} is longer than {MAX_DURATION_S // 86_400}d")
    return seconds


_UNITS_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes of an amount of memory such as 80GiB, 24GB or 512MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_BYTES:
        raise typer.BadParameter(f"{text!r} is not an amount of memory such as 80GiB or 24GB")
    return int(float(match[1]) * _UNITS_BYTES[match[2]])


def parse_sizes(text: str) -> tuple[int, ...]:
    """Ascending sizes such as 1,2,8, or 1..128: doubled from the first to the last."""
    first, dots, last = text.partition("..")
    try:
        sizes = [int(word) for word in text.split(",")] if not dots else [int(first)]
        while dots and 0 < sizes[-1] < int(last):
            sizes.append(min(2 * sizes[-1], int(last)))
        is_ascending = sizes == sorted(set(sizes)) and (not dots or sizes[-1] == int(last))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of sizes such as 1,2,4 or 1..128") from None
    if not is_ascending or not 1 <= sizes[0] <= sizes[-1] <= _MAX_SIZE:
        raise typer.BadParameter(f"{text!r} has sizes that do not ascend from 1 to at most {_MAX_SIZE:,}")
    return tuple(sizes)


def safe_text(text: str) -> Text:
    # Clients choose these names: neither markup nor escape sequences in them may reach the terminal.
    return Text("".join(char if char.isprintable() else "·" for char in text))


def format_count(number: float | None) -> str:
    if number is None:
        return EMPTY
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999 950 would round to 1000.0k.
        if number >= size * 0.99995 and number >= 1000:
            scaled = number / size
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def format_ms(ms: float | None) -> str:
    return EMPTY if ms is None else format_seconds(ms / 1000)


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return EMPTY
    ms = seconds * 1000
    if ms < 0.05:
        return "0"
    if ms < 9.95:
        return f"{ms:.1f}ms"
    if ms < 999.5:
        return f"{ms:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    if (whole := round(seconds)) < 3600:
        return f"{whole // 60}m{whole % 60:02}"
    return f"{whole // 3600}h{whole % 3600 // 60:02}"


def format_age(then: float, now: float) -> str:
    seconds = max(0.0, now - then)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"
