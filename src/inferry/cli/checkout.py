"""Where the project's own files are, for what works on them, and whether what runs was compiled from them."""

from importlib.util import find_spec
from pathlib import Path

ROOT = next((path for path in Path(__file__).parents if (path / "pyproject.toml").exists()), Path.cwd())
"""The checkout this package lies in, at whatever depth: the source, or what was compiled from it. Installed elsewhere,
it is the current directory."""


def is_compiled() -> bool:
    """Whether the path of a call is C in this process, or plain Python."""
    spec = find_spec("inferry.scheduling.scheduler")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
