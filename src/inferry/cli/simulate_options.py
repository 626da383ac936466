"""Options that `inferry simulate` and `inferry plan fleet` have in common."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from inferry.sim.workload import Workload, check, parse_lanes


class WorkloadOptions(Struct, frozen=True, kw_only=True):
    """The workload to play."""

    trace: Annotated[
        Path | None, typer.Option("--trace", help="Recorded trace, CSV or JSON lines, gzipped or not.", metavar="FILE")
    ] = None
    scenario: Annotated[str | None, typer.Option("--scenario", help="harbor or simple-harbor.")] = None
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", help="Seconds in which runs start; default: 60 for a scenario, the length of a trace."
        ),
    ] = None
    scale: Annotated[
        float, typer.Option("--scale", help="Factor on the load: more runs of a scenario, a faster trace.")
    ] = 1.0
    digests: Annotated[int, typer.Option("--digests", min=0, help="Batch jobs at the start of the scenario.")] = 300
    lane: Annotated[
        str, typer.Option("--lane", help="Lane of a trace's runs, or fractions drawn by seed: P0=0.2,P1=0.5,P2=0.3.")
    ] = "P1"
    session_gap_s: Annotated[
        float, typer.Option("--session-gap-s", min=0.0, help="Seconds between sessions of a trace without times.")
    ] = 1.0

    def workload(self) -> Workload:
        """Raises SimulationSetupError for options that do not go together."""
        return check(
            Workload(
                trace=self.trace,
                scenario=self.scenario,
                seconds=self.seconds,
                scale=self.scale,
                digests=self.digests,
                lanes=parse_lanes(self.lane),
                session_gap_s=self.session_gap_s,
            )
        )


class TargetOptions(Struct, frozen=True, kw_only=True):
    """The engine model, and the SLO targets that are measured against."""

    model_file: Annotated[
        Path | None,
        typer.Option("--model", "--engine", help="Engine model; default: 8B on an H200.", metavar="MODEL.json"),
    ] = None
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo",
            help="SLO targets of a lane in ms, instead of the configuration's: P0=500,30, or P0=500,30,40 with the "
            "TTFT that 1,000 uncached prompt tokens add.",
            metavar="LANE=TTFT,ITL[,PER_1K]",
        ),
    ] = None
