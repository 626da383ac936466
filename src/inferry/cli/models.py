"""`inferry models`: what the embedded engine makes of a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.table import Table

from inferry.cli.formats import parse_bytes, safe_text
from inferry.cli.terminal import console, fail

if TYPE_CHECKING:
    from inferry.engine.model_check import MemoryReport, ModelReport

models_app = typer.Typer(help="Checkpoints for the embedded engine.", no_args_is_help=True)

UNUSABLE = 1
BUNDLED = "bundled"
"""Names the bundled model, where there is no directory of this name."""
# As `inferry.engine.memory.PROFILES`, which needs the `engine` extra.
Profile = Literal["throughput", "latency"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Mode = Literal["continuous", "hybrid", "dynamic", "static"]


@models_app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face model directory, or `bundled`.")],
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the device, such as 80GiB; default: this machine's.")
    ] = None,
    profile: Annotated[
        Profile, typer.Option(help="Share of the memory to use: 80 % for throughput, 25 % for latency.")
    ] = "throughput",
    share: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of the memory to use, instead of a profile's.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Device to check for; auto is a GPU if there is one.")] = "auto",
    dtype: Annotated[
        Dtype,
        typer.Option(help="Dtype of weights and KV cache; auto is float32 on a CPU and the checkpoint's on a GPU."),
    ] = "auto",
    mode: Annotated[Mode, typer.Option(help="Mode of the worker; padded passes need other memory.")] = "continuous",
    context_tokens: Annotated[
        int | None, typer.Option("--context", min=1, metavar="TOKENS", help="Context of a call; default: the model's.")
    ] = None,
    call_tokens: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Expected prompt and output tokens of a call.")
    ] = 2048,
    adapters: Annotated[int, typer.Option(min=0, metavar="N", help="LoRA adapters to reserve memory for.")] = 0,
    adapter_rank: Annotated[int, typer.Option(min=1, metavar="RANK", help="Largest rank of an adapter.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Say whether the embedded engine can serve a checkpoint, what is unsupported, the memory it needs, and the batch
    size and context that fit. Exits with 0 if it can be served, 1 if not, 2 if DIR is no model directory."""
    try:
        from inferry.engine.bundled import BUNDLED_DIRECTORY
        from inferry.engine.checkpoint import UnsupportedModel
        from inferry.engine.config import DEVICE_DEFAULTS
        from inferry.engine.device_memory import cpu_memory
        from inferry.engine.memory import PROFILES
        from inferry.engine.model_check import Budget, check_model
        from inferry.engine.runner import cuda_memory
    except ModuleNotFoundError as error:
        fail(f"`inferry models` needs {error.name}: pip install 'inferry[engine]', in a clone pip install '.[engine]'")
    gpu_bytes = cuda_memory()
    chosen = ("cpu" if gpu_bytes is None else "cuda") if device == "auto" else device
    detected = gpu_bytes if chosen == "cuda" else None
    if memory is None and chosen == "cuda" and detected is None:
        fail("this machine has no GPU: give its memory with --memory")
    device_bytes = parse_bytes(memory) if memory is not None else detected or cpu_memory().total
    share = PROFILES[profile] if share is None else share
    budget = Budget(device=chosen, device_bytes=device_bytes, share=share, call_tokens=call_tokens)
    config = msgspec.structs.replace(DEVICE_DEFAULTS[chosen], context_tokens=context_tokens, dtype=dtype, mode=mode)
    config = msgspec.structs.replace(config, max_adapters=adapters, max_adapter_rank=adapter_rank)
    is_bundled = str(directory) == BUNDLED and not directory.exists()
    if not is_bundled and not directory.is_dir():
        fail(f"{directory} is not a directory" if directory.exists() else f"there is no directory {directory}")
    try:
        report = check_model(BUNDLED_DIRECTORY if is_bundled else directory, config, budget)
    except UnsupportedModel as error:
        fail(str(error))
    _print(report, as_json)
    if not report.is_usable:
        raise typer.Exit(UNUSABLE)


def _print(report: "ModelReport", as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    out = console()
    table = Table("model", report.directory, title_justify="left")
    table.add_row("architecture", safe_text(report.architecture))
    table.add_row("stored as", safe_text(report.dtype))
    table.add_row("RoPE", safe_text(report.rope))
    for name, value in (report.dimensions or {}).items():
        table.add_row(name.replace("_", " "), "none" if value is None else f"{value:,}")
    table.add_row("tasks", ", ".join(report.tasks) or "none")
    table.add_row("tokenizer", "yes" if report.has_tokenizer else "no")
    table.add_row("chat template", "yes" if report.has_chat_template else "no: only /v1/completions")
    out.print(table)
    if report.memory is not None:
        _print_memory(report.memory)
    for kind, reasons in (("unsupported", report.unsupported), ("missing", report.missing)):
        for reason in reasons:
            out.print(safe_text(f"{kind}: {reason}"), style="bold red")
    if report.is_usable:
        out.print("The embedded engine can serve this model.", style="green")


def _print_memory(memory: "MemoryReport") -> None:
    out = console()
    table = Table("memory", f"{memory.device}, {memory.dtype}")
    table.add_row("device", _gib(memory.device_bytes))
    table.add_row("budget", _gib(memory.budget_bytes))
    table.add_row("weights", _gib(memory.weight_bytes))
    table.add_row("KV cache per token", f"{memory.kv_token_bytes / 1024:.1f} KiB")
    if memory.recommended is None:
        out.print(table)
        out.print("unsupported: the model does not fit into the budget", style="bold red")
        return
    if memory.adapter_bytes:
        table.add_row("LoRA adapters", _gib(memory.adapter_bytes))
    table.add_row("KV cache", _gib(memory.kv_cache_bytes or 0))
    table.add_row("workspace", _gib(memory.workspace_bytes or 0))
    table.add_row("runtime", _gib((memory.runtime_bytes or 0) + (memory.graph_bytes or 0)))
    table.add_row("all", _gib(memory.total_bytes or 0))
    out.print(table)
    table = Table("recommended setting", "value")
    for name, value in memory.recommended.items():
        table.add_row(name, f"{value:,}")
    for tokens, sequences in memory.sequences_by_tokens.items():
        table.add_row(f"calls of {tokens:,} tokens at once", f"{sequences:,}")
    out.print(table)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
