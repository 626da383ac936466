"""vLLM in process as a worker: `AsyncLLM` in a child process, run by the Python of vLLM's virtual environment."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from inferry.domain.clock import Clock
from inferry.domain.ports import TextAssembler
from inferry.domain.routes import OutputLength
from inferry.domain.workers import KvPacking
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram, OpenLink
from inferry.workers.in_process.engine_worker import EngineLimits, EngineWorker
from inferry.workers.in_process.vllm_process import BOOTSTRAP, VllmSetup
from inferry.workers.openai_http.request_bodies import CacheSalts

_PACKAGE = Path(__file__).parents[2]
_SHUTDOWN_GRACE_S = 15.0


class VllmEngine(Struct, frozen=True, kw_only=True):
    """How vLLM is started. `python` is the interpreter of its environment. `arguments` are passed to `AsyncEngineArgs`
    and override the other fields.
    """

    python: Path
    max_sequences: int = 256
    chunk_tokens: int = 2048
    context_tokens: int | None = None
    arguments: Mapping[str, Any] = {}

    def engine_arguments(self, model_dir: Path) -> dict[str, Any]:
        found: dict[str, Any] = {
            "model": str(model_dir),
            "max_num_seqs": self.max_sequences,
            "max_num_batched_tokens": self.chunk_tokens,
            "scheduling_policy": "priority",
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
        }
        if self.context_tokens is not None:
            found["max_model_len"] = self.context_tokens
        return {**found, **self.arguments}


class VllmInProcessWorker(EngineWorker):
    """vLLM without its HTTP server: token ids in and out, lanes as priorities, and measured steps.

    The prompt tokens in flight are limited to four steps, as for the embedded engine. The process is on this host
    unless `open_link` says otherwise.
    """

    def __init__(
        self,
        name: str,
        *,
        model_dir: Path,
        models: Sequence[str],
        engine: VllmEngine,
        make_assembler: Callable[[tuple[str, ...]], TextAssembler],
        controlled: bool = False,
        group: str = "default",
        pool: str | None = None,
        precision: str | None = None,
        output_length: OutputLength | None = None,
        kv_packing: KvPacking = "sum",
        gpus: int | None = None,
        clock: Clock | None = None,
        default_output_tokens: int | None = None,
        restart_backoff_s: float = 1.0,
        stall_timeout_s: float = 120.0,
        open_link: OpenLink | None = None,
    ) -> None:
        arguments = engine.engine_arguments(model_dir)
        chunk_tokens = int(arguments["max_num_batched_tokens"])
        super().__init__(
            name,
            open_link=open_link or partial(EngineLink.open, vllm_program(engine.python, arguments)),
            limits=EngineLimits(
                sequences=int(arguments["max_num_seqs"]),
                kv_tokens=None,
                prefill_tokens=4 * chunk_tokens,
                chunk_tokens=chunk_tokens,
            ),
            models=models,
            make_assembler=make_assembler,
            controlled=controlled,
            group=group,
            pool=pool,
            precision=precision,
            output_length=output_length,
            kv_packing=kv_packing,
            gpus=gpus or _parallel_gpus(arguments),
            salt_for=CacheSalts(os.urandom(32)).salt,
            context_tokens=engine.context_tokens,
            clock=clock,
            default_output_tokens=default_output_tokens,
            restart_backoff_s=restart_backoff_s,
            stall_timeout_s=stall_timeout_s,
        )


def _parallel_gpus(arguments: dict[str, Any]) -> int:
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


def vllm_program(python: Path, arguments: dict[str, Any]) -> EngineProgram:
    """vLLM with the interpreter of its own environment."""
    # Without the gateway's environment: vLLM pins other versions of the same packages.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PATH"] = os.pathsep.join([str(python.parent), environment.get("PATH", "")])
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    return EngineProgram(
        command=(str(python), "-I", "-c", BOOTSTRAP, str(_PACKAGE)),
        environment=environment,
        setup=VllmSetup(arguments),
        grace_s=_SHUTDOWN_GRACE_S,
    )
