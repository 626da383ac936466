"""Tables of `inferry config`."""

import time
from typing import Any

import msgspec
from rich.table import Table

from inferry.cli.settings_try import Prediction

_PREDICTED = (
    ("attainment", "attainment", "{:.1%}"),
    ("TTFT p50, s", "ttft_p50", "{:.3f}"),
    ("TTFT p95, s", "ttft_p95", "{:.3f}"),
    ("tokens/s of a call", "throughput", "{:.1f}"),
    ("cost per 1,000 tokens", "cost", "{:.4g}"),
)


def shown_value(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def prediction_table(prediction: Prediction) -> Table:
    """A row per lane and figure: what the ledger has, the current and the new version simulated, their difference."""
    table = Table("lane", "figure", "measured", "current", "new", "difference", box=None, pad_edge=False)
    for lane, before in prediction.current.items():
        after, measured = prediction.new.get(lane), prediction.measured.get(lane)
        for heading, name, text in _PREDICTED:
            old, new = getattr(before, name), None if after is None else getattr(after, name)
            was = None if measured is None else getattr(measured, name)
            table.add_row(
                lane, heading, _shown(text, was), _shown(text, old), _shown(text, new), _difference(name, old, new)
            )
    return table


def _shown(text: str, value: float | None) -> str:
    return "-" if value is None else text.format(value)


def _difference(name: str, old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "-"
    if name == "attainment":
        return f"{(new - old) * 100:+.1f} points"
    return f"{new / old - 1:+.1%}" if old else "-"


def change_table(history: dict[str, Any]) -> Table:
    """A row per change, the latest first."""
    table = Table("at (UTC)", "change", "active", "tried", "share", "made for", "note", box=None, pad_edge=False)
    versions = {one["number"]: one for one in history["versions"]}
    for change in history["changes"]:
        candidate, split = change["candidate"], change["split"]
        version = versions.get(candidate or change["active"], {})
        table.add_row(
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(change["at"])),
            change["kind"],
            str(change["active"]),
            "" if candidate is None else str(candidate),
            "" if split is None else f"{split['share']:.0%}",
            ", ".join(version.get("models", ())),
            change["reason"] or ("" if change["kind"] == "rollback" else version.get("note", "")),
        )
    return table


def comparison_table(comparison: dict[str, Any]) -> Table:
    """A row per measure: both versions, the difference and its interval."""
    table = Table("measure", "lane", "active", "tried", "difference", "interval", "runs", box=None, pad_edge=False)
    for one in comparison["measures"]:
        is_share = one["name"] in ("attainment", "errors")
        text = "{:.1%}" if is_share else "{:.4g}"
        unit = " points" if is_share else " %"
        table.add_row(
            one["name"],
            one["lane"] or "all",
            text.format(one["active"]),
            text.format(one["candidate"]),
            f"{one['difference'] * 100:+.1f}{unit}",
            f"{one['low'] * 100:+.1f} to {one['high'] * 100:+.1f}",
            f"{one['active_runs']} + {one['candidate_runs']}",
        )
    return table
