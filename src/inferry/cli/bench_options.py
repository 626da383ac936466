"""The options of `inferry bench`, by the panels of its help."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

ARRIVALS, SERVER, MEASURE, AFTER = "Workload", "Server", "Measurement", "Results"


class ServerOptions(Struct, frozen=True, kw_only=True):
    """The server, and how calls are sent to it."""

    url: Annotated[
        str | None, typer.Option(help="URL of the server, such as http://host:8000.", rich_help_panel=SERVER)
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Model name; default: the only model of the server.", metavar="NAME", rich_help_panel=SERVER),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key; default: INFERRY_API_KEY or OPENAI_API_KEY.",
            metavar="KEY",
            rich_help_panel=SERVER,
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(help="Additional request header; may be repeated.", metavar="NAME=VALUE", rich_help_panel=SERVER),
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(
            help="ids, text or chat; default: token ids if the server accepts them, else text.", rich_help_panel=SERVER
        ),
    ] = None
    lane_by: Annotated[
        str,
        typer.Option(
            help="How the lane is sent: header (x-inferry-lane), priority (vLLM's field) or none.",
            rich_help_panel=SERVER,
        ),
    ] = "header"
    tenant_header: Annotated[str, typer.Option(help="Header for the tenant; empty: none.", rich_help_panel=SERVER)] = (
        "x-inferry-tenant"
    )
    run_ids: Annotated[
        bool,
        typer.Option(
            "--run-ids/--no-run-ids",
            help="Send x-inferry-run-id and x-inferry-step-id.",
            rich_help_panel=SERVER,
        ),
    ] = True


class WorkloadOptions(Struct, frozen=True, kw_only=True):
    """The calls to send, and the limits of the client."""

    poisson: Annotated[
        float | None,
        typer.Option(help="Poisson arrivals, RATE calls per second.", metavar="RATE", rich_help_panel=ARRIVALS),
    ] = None
    bursts: Annotated[
        str | None,
        typer.Option(
            help="CALLS per burst, PERIOD between bursts, DURATION of a burst (seconds): 40,10,1.",
            metavar="CALLS,PERIOD,DURATION",
            rich_help_panel=ARRIVALS,
        ),
    ] = None
    agents: Annotated[
        str | None,
        typer.Option(
            help="COUNT runs of STEPS sequential calls with tool time between them (seconds): 20,6,0.1-2.",
            metavar="COUNT,STEPS[,TOOL_S]",
            rich_help_panel=ARRIVALS,
        ),
    ] = None
    scenario: Annotated[
        str | None, typer.Option(help="harbor or simple-harbor, as in `inferry simulate`.", rich_help_panel=ARRIVALS)
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded trace, CSV or JSON lines.", metavar="FILE", rich_help_panel=ARRIVALS),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds in which runs start; default: 60, or the length of the trace. All runs then complete.",
            rich_help_panel=ARRIVALS,
        ),
    ] = None
    scale: Annotated[float, typer.Option(help="Factor on the load.", rich_help_panel=ARRIVALS)] = 1.0
    seed: Annotated[int, typer.Option(help="The same seed sends the same calls.", rich_help_panel=ARRIVALS)] = 7
    digests: Annotated[
        int, typer.Option(min=0, help="Batch jobs at the start of the scenario.", rich_help_panel=ARRIVALS)
    ] = 300
    lane: Annotated[
        str,
        typer.Option(
            help="Lane of runs without one, or fractions drawn by seed: P0=0.2,P1=0.5,P2=0.3.",
            rich_help_panel=ARRIVALS,
        ),
    ] = "P1"
    tenants: Annotated[str, typer.Option(help="Tenants, drawn by seed: a,b,c.", rich_help_panel=ARRIVALS)] = "bench"
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Prompt tokens per call, if the workload has none.", metavar="FROM-TO", rich_help_panel=ARRIVALS
        ),
    ] = "200-2000"
    output_tokens: Annotated[
        str,
        typer.Option(
            help="Output tokens per call, if the workload has none.", metavar="FROM-TO", rich_help_panel=ARRIVALS
        ),
    ] = "20-200"
    session_gap_s: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds between sessions of a trace without times.", rich_help_panel=ARRIVALS),
    ] = 1.0
    max_context: Annotated[
        int | None,
        typer.Option(
            min=16, help="Cut prompts to this context length; default: the model's.", rich_help_panel=ARRIVALS
        ),
    ] = None
    salt: Annotated[
        str | None,
        typer.Option(
            help="Salt of the prompts; default: a random one, so that no cache contains them.", rich_help_panel=ARRIVALS
        ),
    ] = None
    pods: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Closed loop: runs are divided among PODS pods, and a pod sends one call at a time.",
            metavar="PODS",
            rich_help_panel=ARRIVALS,
        ),
    ] = None
    concurrency_cap: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum calls in flight; default: no limit.", rich_help_panel=ARRIVALS),
    ] = None
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            help="Retries after 408, 409, 429, 5xx or a reset before the first byte, as in the official SDKs.",
            rich_help_panel=ARRIVALS,
        ),
    ] = 2
    call_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a call counts as failed.", rich_help_panel=ARRIVALS)
    ] = 300.0


class MeasurementOptions(Struct, frozen=True, kw_only=True):
    """What counts, and against which targets and prices."""

    warmup: Annotated[
        float, typer.Option(min=0.0, help="Seconds at the start whose calls do not count.", rich_help_panel=MEASURE)
    ] = 0.0
    ttft_ms: Annotated[
        list[str] | None,
        typer.Option(
            help="TTFT target of one lane (P0=500) or all; default: the lanes' targets.",
            metavar="[LANE=]MS",
            rich_help_panel=MEASURE,
        ),
    ] = None
    itl_ms: Annotated[
        list[str] | None,
        typer.Option(help="ITL target, in the same form.", metavar="[LANE=]MS", rich_help_panel=MEASURE),
    ] = None
    gpu_cost_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="Price of a GPU-hour, for the cost per run.", rich_help_panel=MEASURE)
    ] = None
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.", rich_help_panel=MEASURE)] = 1
    run_budget: Annotated[float | None, typer.Option(min=0.0, help="Budget of a run.", rich_help_panel=MEASURE)] = None
    model_costs: Annotated[
        Path | None,
        typer.Option(
            help="Engine model for utilisation and work: a file of `inferry calibrate`, or a shipped name.",
            metavar="MODEL.json",
            rich_help_panel=MEASURE,
        ),
    ] = None


class ResultOptions(Struct, frozen=True, kw_only=True):
    """What happens to the result, or which results to compare."""

    label: Annotated[str, typer.Option(help="Name of this result in comparisons.", rich_help_panel=AFTER)] = ""
    out: Annotated[
        Path | None, typer.Option(help="Write the result to this file.", metavar="RESULT.json", rich_help_panel=AFTER)
    ] = None
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write an HTML report with plots.", metavar="FILE", rich_help_panel=AFTER),
    ] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare results files; sends nothing.", rich_help_panel=AFTER)
    ] = False
    before_after: Annotated[
        bool,
        typer.Option(
            "--before-after",
            help="Compare two results files by utilisation, step latency, cost and budget; sends nothing.",
            rich_help_panel=AFTER,
        ),
    ] = False
