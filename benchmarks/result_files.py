"""Result files: one JSON file per benchmark, with command, commit and versions."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from inferry.cli.checkout import ROOT, is_compiled

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("inferry", "aiohttp", "httptools", "msgspec", "torch", "transformers", "uvicorn", "uvloop")


def save(name: str, result: dict[str, Any], *, command: str | None = None, folder: Path | None = None) -> Path:
    """Write a result with its command, commit and versions, to `RESULTS` or to another folder."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('_', '-')}.json"
    record = {
        "bench": name,
        "command": command or f"make bench BENCH={name}",
        "commit": commit_of(ROOT) or "unknown",
        "compiled": is_compiled(),
        **circumstances(),
        "result": result,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def circumstances() -> dict[str, Any]:
    """Time, machine and versions of a measurement."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "cpu": _cpu(), "python": platform.python_version()},
        "versions": {package: _version(package) for package in PACKAGES},
    }


def commit_of(tree: Path) -> str | None:
    """The commit of a checkout, and whether its sources have changed since; None outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tree), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    if not (tree / ".git").exists():
        return None
    changed = git("status", "--porcelain", "--", "src", "pyproject.toml")
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
