"""Inferry: the inference gateway and scheduler for fleets of LLM agents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inferry._version import __version__

if TYPE_CHECKING:
    from inferry.domain.errors import QueueFull
    from inferry.pipelines.batched.decorator import batched
    from inferry.pipelines.batched.outcomes import BatchResultError

__all__ = ["BatchResultError", "QueueFull", "__version__", "batched"]

_MODULES = {
    "BatchResultError": "inferry.pipelines.batched.outcomes",
    "QueueFull": "inferry.domain.errors",
    "batched": "inferry.pipelines.batched.decorator",
}
"""Imported on first use: `import inferry` alone stays light."""

if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)
