"""Where the project's own files are, for what works on them: measurements and generated pages."""

from pathlib import Path

ROOT = next((path for path in Path(__file__).parents if (path / "pyproject.toml").exists()), Path.cwd())
"""The checkout this package lies in, at whatever depth: the source, or what was compiled from it. Installed elsewhere,
it is the current directory."""
