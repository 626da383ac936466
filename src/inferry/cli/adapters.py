"""`inferry adapters`: load and unload LoRA adapters of a running gateway."""

from pathlib import Path
from typing import Annotated

import typer

from inferry.cli.gateway_client import DEFAULT_URL, Url, ask

adapters_app = typer.Typer(help="LoRA adapters of a running gateway: load, unload.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name that calls use as a model.")]


@adapters_app.command()
def load(
    name: Name,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="PEFT directory on the gateway's machine.")],
    base: Annotated[str | None, typer.Option(help="Base model, where workers have several.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Load an adapter into the embedded engine. DIR must be below `adapter_dirs` of the worker."""
    body = {"lora_name": name, "lora_path": str(directory.absolute()), "base_model_name": base}
    answer = ask(url, "POST", "/v1/load_lora_adapter", body=body)
    typer.echo(f"{name} is loaded on {', '.join(answer['workers'])}")


@adapters_app.command()
def unload(name: Name, url: Url = DEFAULT_URL) -> None:
    """Unload an adapter: no new calls. Returns when running ones have ended."""
    answer = ask(url, "POST", "/v1/unload_lora_adapter", body={"lora_name": name}, timeout_s=None)
    typer.echo(f"{name} is unloaded on {', '.join(answer['workers'])}")
