"""The tokenizers of a process that passes its jobs on to the owner of the workers.

The owner's catalog says which tokenizer each model has. A process uses those that its own configuration has too, under
the owner's names, so adapters and replaced checkpoints are followed. It reads its configuration again, in a thread,
where the catalog names another one. Prompts whose tokenizer it lacks are tokenized by the owner.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from inferry.cli.config.loader import load_workers
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.workers import EmbeddedWorkerConfig, RayWorkerConfig, VllmInProcessWorkerConfig
from inferry.cli.worker_wiring import make_worker
from inferry.domain.clock import Clock
from inferry.domain.ports import Tokenizer
from inferry.workers.remote.owner_link import OwnerLink

log = logging.getLogger(__name__)


def read_tokenizers(config: Config, clock: Clock) -> dict[str, Tokenizer]:
    """The tokenizers of engines that take token ids. Their workers are not started."""
    watched = () if config.workers_file is None else load_workers(Path(config.workers_file))
    found: dict[str, Tokenizer] = {}
    for worker in (*config.workers, *watched):
        engine = worker.engine if isinstance(worker, RayWorkerConfig) else worker
        if isinstance(engine, EmbeddedWorkerConfig | VllmInProcessWorkerConfig):
            found.update(make_worker(engine, clock)[1])
    return found


class IngressTokenizers:
    """Keeps `in_use`, tokenizers by model, as the catalog of the link names them. Ends with `close`.

    `in_use` is changed by the event loop only.
    """

    def __init__(self, in_use: dict[str, Tokenizer], read: Callable[[], dict[str, Tokenizer]]) -> None:
        self._in_use = in_use
        self._read = read
        self._known: dict[str, Tokenizer] = {}
        self._named: dict[str, str] | None = None
        self._link: OwnerLink | None = None
        self._reading: asyncio.Task[None] | None = None

    def follow(self, link: OwnerLink) -> None:
        """Follow this link's catalogs from now on."""
        self._known |= {one.fingerprint: one for one in self._in_use.values()}
        self._link = link
        on_change = link.on_change

        def changed() -> None:
            on_change()
            self._changed(link)

        link.on_change = changed
        self._changed(link)

    def _changed(self, link: OwnerLink) -> None:
        if link is self._link and link.catalog is not None:
            self.use(link.catalog.tokenizers)

    def use(self, named: dict[str, str] | None) -> None:
        """Use the tokenizers with these fingerprints, by model. None: an owner that does not name them."""
        if named == self._named:
            return
        self._named = named
        if named is None:
            return
        self._apply(named)
        if self._reading is None and not self._known.keys() >= set(named.values()):
            self._reading = asyncio.get_running_loop().create_task(self._read_again())

    async def close(self) -> None:
        """Change nothing any more. A read that is under way is abandoned."""
        self._link = self._named = None
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_again(self) -> None:
        named = None
        while named != self._named and self._named is not None:
            named = self._named
            try:
                found = await asyncio.to_thread(self._read)
            except (ConfigError, OSError) as error:
                log.warning("the tokenizers of the workers were not read again: %s", error)
                continue
            used = set(self._named.values())
            self._known = {key: one for key, one in self._known.items() if key in used}
            self._known |= {one.fingerprint: one for one in found.values()}
            self._apply(self._named)
        self._reading = None

    def _apply(self, named: dict[str, str]) -> None:
        found = {model: self._known[key] for model, key in named.items() if key in self._known}
        self._in_use.clear()
        self._in_use.update(found)
