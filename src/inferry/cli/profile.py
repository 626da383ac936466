"""`inferry profile`: where the embedded engine spends its steps, by batch size."""

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from msgspec import Struct

from inferry._version import __version__
from inferry.cli.bench_output import note, rich_table
from inferry.cli.formats import parse_sizes
from inferry.cli.option_groups import grouped
from inferry.cli.terminal import console, fail, write_file
from inferry.engine.bundled import BUNDLED_DIRECTORY, check_bundled_model
from inferry.report.formatting import seconds

if TYPE_CHECKING:
    from inferry.engine.config import EngineConfig
    from inferry.engine.profiling.result import Point, Profile
    from inferry.engine.profiling.session import ProfileSettings

UNUSABLE, INTERRUPTED = 1, 130
BUNDLED = "bundled"
_DEFAULT_SIZES = {"cpu": "1..32", "cuda": "1..256"}
_PACKAGES = ("torch", "triton", "numpy")
Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineOptions(Struct, frozen=True, kw_only=True):
    """The engine that is profiled."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device to profile; auto is a GPU if there is one.")
    ] = "auto"
    dtype: Annotated[
        Dtype,
        typer.Option(help="Dtype of weights and KV cache; auto is float32 on a CPU and the checkpoint's on a GPU."),
    ] = "auto"
    chunk_tokens: Annotated[
        int | None,
        typer.Option(min=2, metavar="TOKENS", help="Most prompt tokens of a step; default: the engine's limit."),
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch on a CPU; default: half of the cores, as the engine.")
    ] = None
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights of the shape in config.json; no others are read.")
    ] = False


class StepOptions(Struct, frozen=True, kw_only=True):
    """The steps that are measured."""

    batch_sizes: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="1,2,4, or 1..64 for doubled sizes; default: 1..32, on a GPU 1..256."),
    ] = None
    context: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Tokens that a sequence of a decode step sees.")
    ] = 512
    prompt_tokens: Annotated[int, typer.Option(min=2, metavar="TOKENS", help="Tokens of each prompt.")] = 128
    steps: Annotated[int, typer.Option(min=1, help="Steps measured for each size.")] = 20


@grouped
def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_DIR|bundled", help="A Hugging Face model directory, or the bundled model.")
    ],
    *,
    engine: EngineOptions,
    measured: StepOptions,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the profile as JSON.")] = None,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
) -> None:
    """Profile decode and prefill steps of the embedded engine over batch sizes: time by kind of kernel, bytes and
    operations against what the device achieves, memory- or compute-bound, and the batch size of the transition."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to the terminal; read when it is imported
    try:
        from inferry.engine.config import DEVICE_DEFAULTS
        from inferry.engine.profiling.session import ProfileSettings
        from inferry.engine.runner import cuda_memory
    except ModuleNotFoundError as error:
        fail(f"`inferry profile` needs {error.name}: pip install 'inferry[engine]', in a clone pip install '.[engine]'")
    for path in (json_file, page):
        if path is not None and not path.absolute().parent.is_dir():
            fail(f"no such directory: {path.absolute().parent}")
    has_gpu = cuda_memory() is not None
    if engine.device == "cuda" and not has_gpu:
        fail("torch finds no GPU: use --device cpu")
    chosen: Device = ("cuda" if has_gpu else "cpu") if engine.device == "auto" else engine.device
    config = DEVICE_DEFAULTS[chosen]
    chunk_tokens = engine.chunk_tokens or config.chunk_tokens
    config = msgspec.structs.replace(config, chunk_tokens=chunk_tokens, dtype=engine.dtype, threads=engine.threads)
    settings = ProfileSettings(
        batch_sizes=parse_sizes(measured.batch_sizes or _DEFAULT_SIZES[chosen]),
        context_tokens=measured.context,
        prompt_tokens=measured.prompt_tokens,
        steps=measured.steps,
    )
    found = _run(_directory(model), config, settings, is_random=engine.random_weights)
    _write(found, json_file, page)
    _print(found)
    for path in (json_file, page):
        if path is not None:
            note(f"written to {path}")


def _directory(model: str) -> Path:
    if model == BUNDLED:
        try:
            check_bundled_model(BUNDLED_DIRECTORY)
        except ValueError as error:
            fail(str(error))
        return BUNDLED_DIRECTORY
    directory = Path(model).expanduser()
    if not directory.is_dir():
        fail(f"no such directory: {model}; the bundled model is named {BUNDLED}")
    return directory


def _run(directory: Path, config: "EngineConfig", settings: "ProfileSettings", *, is_random: bool) -> "Profile":
    from inferry.engine.checkpoint import UnsupportedModel, weight_files
    from inferry.engine.dtypes import UnsupportedDtype
    from inferry.engine.memory import OutOfMemory
    from inferry.engine.profiling.session import run_profile

    try:
        if not is_random:
            weight_files(directory)
    except UnsupportedModel as error:
        fail(f"{error}; --random-weights needs config.json only")
    try:
        found = run_profile(directory, config, settings, is_random=is_random, on_point=_show_progress)
    except OutOfMemory as error:
        fail(
            f"not enough memory for {max(settings.batch_sizes):,} sequences of {settings.context_tokens:,} tokens: "
            f"{error}",
            UNUSABLE,
        )
    except (UnsupportedModel, UnsupportedDtype) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", INTERRUPTED)
    return msgspec.structs.replace(found, command=shlex.join(["inferry", *sys.argv[1:]]), versions=_versions())


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"inferry": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _show_progress(point: "Point") -> None:
    note(f"{point.phase} {point.batch:,}: {seconds(point.step_s)} per step, {point.bound}-bound")


def _write(found: "Profile", json_file: Path | None, page: Path | None) -> None:
    from inferry.cli.profile_page import html_page
    from inferry.engine.profiling.result import to_json

    if json_file is not None:
        write_file(json_file, to_json(found))
    if page is not None:
        write_file(page, html_page(found).encode())


def _print(found: "Profile") -> None:
    from inferry.cli.profile_page import about, class_table, findings, step_table

    out = console(160)
    for phase in ("decode", "prefill"):
        out.print(f"{phase} steps", style="bold")
        out.print(rich_table(step_table(found, phase)))
        out.print()
        out.print(rich_table(class_table(found, phase)))
        out.print()
    for sentence in (*about(found), *findings(found)):
        out.print(sentence, soft_wrap=True, markup=False)
