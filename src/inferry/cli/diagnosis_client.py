"""The diagnosis of a running gateway, as `doctor` and `top` ask for it."""

from typing import Annotated

import msgspec
import typer

from inferry.cli.formats import parse_duration
from inferry.cli.gateway_client import GatewayProblem, ask_or_raise
from inferry.observe.diagnosis.findings import Diagnosis
from inferry.observe.history import KEPT_S

Window = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        parser=parse_duration,
        help=f"How far back to look; default 5m (doctor) and 1m (top), at most {KEPT_S / 60:.0f}m.",
    ),
]


def fetch_diagnosis(url: str, admin_key: str | None, window_s: float) -> Diagnosis:
    """Raises GatewayProblem."""
    answer = ask_or_raise(url, "GET", f"/admin/diagnosis?window_s={window_s:g}", admin_key)
    try:
        return msgspec.convert(answer, Diagnosis)
    except msgspec.ValidationError:
        raise GatewayProblem(f"{url} is no Inferry gateway of this release") from None
