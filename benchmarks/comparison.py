"""Figures of two commits, compared: ratio, interval, and whether the later commit is worse."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.paired import MIN_PAIRS, paired
from benchmarks.result_files import commit_of

TOLERANCE = 0.02


class Tree(Struct, frozen=True):
    """A checkout with a compiled package, and the name of its commit."""

    commit: str
    root: Path

    @property
    def package(self) -> Path:
        return self.root / "build" / "compiled"


def tree_of(argument: str) -> Tree:
    """`[COMMIT=]PATH`. Without a name the commit is that of the checkout, or else the name of its directory."""
    name, separator, path = argument.rpartition("=")
    root = Path(path).resolve()
    tree = Tree(name if separator else commit_of(root) or root.name, root)
    if not any(tree.package.glob("*__mypyc*.so")):
        raise SystemExit(f"{tree.package} has no compiled package: run `make compiled` in {root}")
    return tree


class Figure(Struct, frozen=True):
    """Measurements of one quantity, pair by pair: each pair was taken in one round, or with one seed."""

    name: str
    before: Sequence[float]
    after: Sequence[float]
    higher_is_better: bool = False


def compared(figure: Figure) -> dict[str, Any]:
    """Medians, the median of the ratios, and its interval where there are enough pairs."""
    ratios = [_ratio(after, before) for before, after in zip(figure.before, figure.after, strict=True)]
    ratio = statistics.median(ratios)
    is_worse = ratio < 1 - TOLERANCE if figure.higher_is_better else ratio > 1 + TOLERANCE
    result: dict[str, Any] = {
        "before": round(statistics.median(figure.before), 4),
        "after": round(statistics.median(figure.after), 4),
        "ratio": round(ratio, 4),
        "better": "higher" if figure.higher_is_better else "lower",
        "worse_by_more_than_2_percent": is_worse,
        "pairs": len(ratios),
    }
    if len(ratios) >= MIN_PAIRS and min(ratios) > 0 and max(ratios) < math.inf:
        interval = paired([math.log(one) for one in ratios], [0.0] * len(ratios))
        result["interval"] = [round(math.exp(interval.low), 4), round(math.exp(interval.high), 4)]
    return result


def line_of(name: str, row: dict[str, Any]) -> str:
    """One line for people."""
    interval = "[{:.3f}, {:.3f}]".format(*row["interval"]) if "interval" in row else ""
    verdict = "WORSE by more than 2 %" if row["worse_by_more_than_2_percent"] else "ok"
    if "interval" in row and row["interval"][0] <= 1 <= row["interval"][1]:
        verdict += ", not significant" if row["worse_by_more_than_2_percent"] else ""
    return f"{name:<66} {row['before']:>10.3f} {row['after']:>10.3f}  {row['ratio']:6.3f} {interval:<16} {verdict}"


def _ratio(after: float, before: float) -> float:
    if before == after:
        return 1.0
    return after / before if before else math.inf
