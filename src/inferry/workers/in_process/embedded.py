"""The embedded engine as a worker: `engine.process`, run by the gateway's interpreter."""

import importlib.util
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from inferry.domain.clock import Clock
from inferry.domain.ports import TextAssembler
from inferry.domain.routes import OutputLength
from inferry.domain.workers import KvPacking
from inferry.engine.config import EngineConfig
from inferry.engine.messages import setup
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram, OpenLink
from inferry.workers.in_process.engine_worker import EngineLimits, EngineWorker
from inferry.workers.in_process.output_formats import TEXT_ONLY, OutputFormats
from inferry.workers.openai_http.request_bodies import CacheSalts


class EmbeddedWorker(EngineWorker):
    """Inferry's own engine, in a process on this host unless `open_link` says otherwise.

    `prefill_tokens` limits the prompt tokens in flight, by default to four chunks. The engine orders prompts by lane:
    a live prompt waits for the current chunk only, and the other chunks keep the engine busy until more are sent. The
    other modes compute prompts in groups, so they have no such default. `hybrid` prepares a second group while the
    first one decodes, so it is sent twice as many jobs. The limits of padded passes are fixed: they are not
    `controlled`.
    """

    def __init__(
        self,
        name: str,
        *,
        model_dir: Path,
        models: Sequence[str],
        make_assembler: Callable[[tuple[str, ...]], TextAssembler],
        controlled: bool = False,
        group: str = "default",
        pool: str | None = None,
        precision: str | None = None,
        output_length: OutputLength | None = None,
        kv_packing: KvPacking = "sum",
        engine: EngineConfig | None = None,
        gpus: int = 1,
        clock: Clock | None = None,
        prefill_tokens: int | None = None,
        default_output_tokens: int | None = None,
        restart_backoff_s: float = 0.5,
        restart_backoff_max_s: float = 30.0,
        stall_timeout_s: float = 30.0,
        formats: OutputFormats = TEXT_ONLY,
        adapters: Mapping[str, Path] | None = None,
        adapter_dirs: Sequence[Path] = (),
        open_link: OpenLink | None = None,
    ) -> None:
        config = replace(engine or EngineConfig(), tool_format=formats.tool_format_name)
        super().__init__(
            name,
            open_link=open_link or partial(EngineLink.open, embedded_program(model_dir, config)),
            limits=_limits(config, prefill_tokens),
            models=models,
            make_assembler=make_assembler,
            controlled=controlled and not config.pads,
            group=group,
            pool=pool,
            precision=precision,
            output_length=output_length,
            kv_packing=kv_packing,
            gpus=gpus,
            salt_for=CacheSalts(os.urandom(32)).salt,
            context_tokens=config.context_tokens,
            clock=clock,
            default_output_tokens=default_output_tokens,
            restart_backoff_s=restart_backoff_s,
            restart_backoff_max_s=restart_backoff_max_s,
            stall_timeout_s=stall_timeout_s,
            can_resume_seeded=True,  # it samples by seed and position
            features=_features(formats),
            formats=formats,
            adapters=adapters,
            adapter_dirs=adapter_dirs,
        )

    def may_load(self, path: str) -> bool:
        return self._adapters.may_load(path)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> Coroutine[Any, Any, None]:
        return self._adapters.unload(name)


def _limits(config: EngineConfig, prefill_tokens: int | None) -> EngineLimits:
    return EngineLimits(
        sequences=config.max_sequences * (2 if config.mode == "hybrid" else 1),
        kv_tokens=None if config.kv_tokens == "auto" else config.blocks * config.block_tokens,
        prefill_tokens=prefill_tokens or (4 * config.chunk_tokens if config.mode == "continuous" else None),
        chunk_tokens=config.chunk_tokens,
        pads=config.pads,
        refills=config.mode == "dynamic",
    )


def _features(formats: OutputFormats) -> frozenset[str]:
    found = set() if formats.token_texts is None else {"logprobs"}
    if importlib.util.find_spec("llguidance") is not None:  # the engine's process imports it
        found |= {"structured_outputs"} if formats.tool_format is None else {"structured_outputs", "tools"}
    return frozenset(found)


def embedded_program(model_dir: Path, config: EngineConfig) -> EngineProgram:
    """The engine with this interpreter and environment."""
    package_root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    return EngineProgram(
        command=(sys.executable, "-m", "inferry.engine.process"),
        environment={**os.environ, "PYTHONPATH": path},
        setup=setup(model_dir, config),
    )
