"""Loads and unloads adapters between steps, for the engine's loop. Owned by its thread."""

from pathlib import Path
from typing import Protocol

from inferry.engine.core import EngineCore
from inferry.engine.messages import AdapterChanged, Rejected, Request
from inferry.engine.peft_config import UnsupportedAdapter


class AdapterStore(Protocol):
    """The adapters of a runner, by number."""

    def load(self, adapter: int, directory: Path) -> None:
        """Raises UnsupportedAdapter."""

    def unload(self, adapter: int) -> None:
        """No sequence uses the adapter."""


class AdapterControl:
    """At most `limit` adapters are loaded. One that sequences still use is unloaded after the last of them ended."""

    def __init__(self, core: EngineCore, store: AdapterStore | None, limit: int) -> None:
        self._core = core
        self._store = store
        self._limit = limit
        self._loaded: set[int] = set()
        self._leaving: list[int] = []

    def rejection(self, request: Request) -> Rejected | None:
        """Why a request cannot be added: its adapter is not loaded, or is being unloaded."""
        if not request.adapter or (request.adapter in self._loaded and request.adapter not in self._leaving):
            return None
        return Rejected(request.key, False, "the adapter is not loaded")

    def load(self, adapter: int, directory: str) -> AdapterChanged:
        if self._store is None or len(self._loaded) >= self._limit:
            return AdapterChanged(adapter, f"max_adapters {self._limit}: there is no place for another adapter")
        try:
            self._store.load(adapter, Path(directory))
        except (UnsupportedAdapter, OSError) as error:
            return AdapterChanged(adapter, str(error))
        except Exception as error:  # files of an adapter may be malformed in any way, and the engine serves other calls
            return AdapterChanged(adapter, f"loading failed ({type(error).__name__})")
        self._loaded.add(adapter)
        return AdapterChanged(adapter)

    def unload(self, adapter: int) -> None:
        """The answer is in `unloaded`, at once or later."""
        if adapter in self._loaded:
            self._leaving.append(adapter)

    def unloaded(self) -> list[AdapterChanged]:
        """Free the adapters that no sequence uses any more."""
        free = [adapter for adapter in self._leaving if not self._core.uses_adapter(adapter)]
        for adapter in free:
            assert self._store is not None
            self._store.unload(adapter)
            self._loaded.remove(adapter)
            self._leaving.remove(adapter)
        return [AdapterChanged(adapter) for adapter in free]
