"""Location of the checkout, and whether the running code is compiled."""

from importlib.util import find_spec
from pathlib import Path

ROOT = next((path for path in Path(__file__).parents if (path / "pyproject.toml").exists()), Path.cwd())
"""The checkout that contains this package, source or compiled; the current directory if installed elsewhere."""


def is_compiled() -> bool:
    """Whether the hot path is compiled in this process."""
    spec = find_spec("inferry.scheduling.scheduler")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
