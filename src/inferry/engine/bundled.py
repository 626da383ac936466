"""The bundled model: a small Llama for support tickets. It is part of the package and the default of a worker."""

import json
from pathlib import Path

BUNDLED_MODEL = "inferry-triage"
BUNDLED_VERSION = "6"
BUNDLED_DIRECTORY = Path(__file__).parent / "triage"
_MARKER = "inferry-triage.json"


def check_bundled_model(directory: Path) -> None:
    """Raise ValueError if the directory lacks the model, or has one of another version."""
    try:
        version = json.loads((directory / _MARKER).read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{directory} has no bundled model: install inferry again, or set `model` of the worker to a model "
            "directory"
        ) from None
    if version != BUNDLED_VERSION:
        raise ValueError(
            f"the bundled model in {directory} has version {version} and this inferry needs version {BUNDLED_VERSION}: "
            "install inferry again, or set `model` of the worker to a model directory"
        )
