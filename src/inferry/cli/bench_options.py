"""The options of `inferry bench`, by the panels of its help."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

_server = partial(typer.Option, rich_help_panel="Server")
_workload = partial(typer.Option, rich_help_panel="Workload")
_measurement = partial(typer.Option, rich_help_panel="Measurement")
_result = partial(typer.Option, rich_help_panel="Results")


class ServerOptions(Struct, frozen=True, kw_only=True):
    """The server, and how calls are sent to it."""

    url: Annotated[str | None, _server(help="URL of the server, such as http://host:8000.")] = None
    model: Annotated[str | None, _server(help="Model name; default: the only model of the server.", metavar="NAME")] = (
        None
    )
    api_key: Annotated[
        str | None, _server(help="API key; default: INFERRY_API_KEY or OPENAI_API_KEY.", metavar="KEY")
    ] = None
    header: Annotated[
        list[str] | None, _server(help="Additional request header; may be repeated.", metavar="NAME=VALUE")
    ] = None
    prompts: Annotated[
        str | None, _server(help="ids, text or chat; default: token ids if the server accepts them, else text.")
    ] = None
    lane_by: Annotated[
        str, _server(help="How the lane is sent: header (x-inferry-lane), priority (vLLM's field) or none.")
    ] = "header"
    tenant_header: Annotated[str, _server(help="Header for the tenant; empty: none.")] = "x-inferry-tenant"
    run_ids: Annotated[bool, _server("--run-ids/--no-run-ids", help="Send x-inferry-run-id and x-inferry-step-id.")] = (
        True
    )


class WorkloadOptions(Struct, frozen=True, kw_only=True):
    """The calls to send, and the limits of the client."""

    poisson: Annotated[float | None, _workload(help="Poisson arrivals, RATE calls per second.", metavar="RATE")] = None
    bursts: Annotated[
        str | None,
        _workload(
            help="CALLS per burst, PERIOD between bursts, DURATION of a burst (seconds): 40,10,1.",
            metavar="CALLS,PERIOD,DURATION",
        ),
    ] = None
    agents: Annotated[
        str | None,
        _workload(
            help="COUNT runs of STEPS sequential calls with tool time between them (seconds): 20,6,0.1-2.",
            metavar="COUNT,STEPS[,TOOL_S]",
        ),
    ] = None
    scenario: Annotated[str | None, _workload(help="harbor or simple-harbor, as in `inferry simulate`.")] = None
    trace: Annotated[Path | None, _workload(help="Recorded trace, CSV or JSON lines.", metavar="FILE")] = None
    duration: Annotated[
        float | None,
        _workload(help="Seconds in which runs start; default: 60, or the length of the trace. All runs then complete."),
    ] = None
    sweep: Annotated[
        str | None,
        _workload(
            help="Closed loop, one level of concurrency after the other: 1,2,4,8, or 1..128 for doubled levels. "
            "--duration and --warmup are per level; default: 10 s and the first call of every client.",
            metavar="LEVELS",
        ),
    ] = None
    level_calls: Annotated[
        int, _workload(min=1, help="Least calls of a level of --sweep; at least one for every client.")
    ] = 20
    scale: Annotated[float, _workload(help="Factor on the load.")] = 1.0
    seed: Annotated[int, _workload(help="The same seed sends the same calls.")] = 7
    digests: Annotated[int, _workload(min=0, help="Batch jobs at the start of the scenario.")] = 300
    lane: Annotated[
        str, _workload(help="Lane of runs without one, or fractions drawn by seed: P0=0.2,P1=0.5,P2=0.3.")
    ] = "P1"
    tenants: Annotated[str, _workload(help="Tenants, drawn by seed: a,b,c.")] = "bench"
    prompt_tokens: Annotated[
        str, _workload(help="Prompt tokens per call, if the workload has none.", metavar="FROM-TO")
    ] = "200-2000"
    output_tokens: Annotated[
        str, _workload(help="Output tokens per call, if the workload has none.", metavar="FROM-TO")
    ] = "20-200"
    session_gap_s: Annotated[float, _workload(min=0.0, help="Seconds between sessions of a trace without times.")] = 1.0
    max_context: Annotated[
        int | None, _workload(min=16, help="Cut prompts to this context length; default: the model's.")
    ] = None
    salt: Annotated[
        str | None, _workload(help="Salt of the prompts; default: a random one, so that no cache contains them.")
    ] = None
    pods: Annotated[
        int | None,
        _workload(
            min=1,
            help="Closed loop: runs are divided among PODS pods, and a pod sends one call at a time.",
            metavar="PODS",
        ),
    ] = None
    concurrency_cap: Annotated[int | None, _workload(min=1, help="Maximum calls in flight; default: no limit.")] = None
    retries: Annotated[
        int,
        _workload(
            min=0, help="Retries after 408, 409, 429, 5xx or a reset before the first byte, as in the official SDKs."
        ),
    ] = 2
    call_timeout_s: Annotated[float, _workload(min=0.1, help="Seconds after which a call counts as failed.")] = 300.0


class MeasurementOptions(Struct, frozen=True, kw_only=True):
    """What counts, and against which targets and prices."""

    warmup: Annotated[float, _measurement(min=0.0, help="Seconds at the start whose calls do not count.")] = 0.0
    ttft_ms: Annotated[
        list[str] | None,
        _measurement(help="TTFT target of one lane (P0=500) or all; default: the lanes' targets.", metavar="[LANE=]MS"),
    ] = None
    ttft_ms_per_1k_tokens: Annotated[
        list[str] | None,
        _measurement(help="TTFT that 1,000 uncached prompt tokens add, in the same form.", metavar="[LANE=]MS"),
    ] = None
    itl_ms: Annotated[list[str] | None, _measurement(help="ITL target, in the same form.", metavar="[LANE=]MS")] = None
    gpu_cost_per_hour: Annotated[
        float | None, _measurement(min=0.0, help="Price of a GPU-hour, for the cost per run.")
    ] = None
    gpus: Annotated[int, _measurement(min=1, help="Number of GPUs.")] = 1
    run_budget: Annotated[float | None, _measurement(min=0.0, help="Budget of a run.")] = None
    model_costs: Annotated[
        Path | None,
        _measurement(
            help="Engine model for utilisation and work: a file of `inferry calibrate`, or a shipped name.",
            metavar="MODEL.json",
        ),
    ] = None


class ResultOptions(Struct, frozen=True, kw_only=True):
    """What happens to the result, or which results to compare."""

    label: Annotated[str, _result(help="Name of this result in comparisons.")] = ""
    out: Annotated[Path | None, _result(help="Write the result to this file.", metavar="RESULT.json")] = None
    page: Annotated[Path | None, _result("--html", help="Write an HTML report with plots.", metavar="FILE")] = None
    csv: Annotated[Path | None, _result(help="Write the levels of a --sweep as CSV.", metavar="FILE")] = None
    compare: Annotated[bool, _result("--compare", help="Compare results files; sends nothing.")] = False
    before_after: Annotated[
        bool,
        _result(
            "--before-after",
            help="Compare two results files by utilisation, step latency, cost and budget; sends nothing.",
        ),
    ] = False
