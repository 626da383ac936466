"""The bundled model: held-out accuracy and answers to unscripted tickets, by the embedded engine on the CPU.

Goal: an accuracy of classification of at least 90 % on templates and vocabulary that are absent from training.
`python -m benchmarks.triage_page` writes the model card and the answers of the README's tour from the result.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from inferry.engine.bundled import BUNDLED_DIRECTORY, BUNDLED_MODEL, check_bundled_model
from training.triage.evaluate import evaluate

DOCUMENTS = 1_000
GOAL = 0.9


def measure(directory: Path = BUNDLED_DIRECTORY, documents: int = DOCUMENTS) -> dict[str, Any]:
    check_bundled_model(directory)
    found = evaluate(directory, documents)
    return {
        "model": describe(directory),
        "goal": GOAL,
        "meets_goal": found["classify"]["accuracy"] >= GOAL,
        **found,
    }


def describe(directory: Path) -> dict[str, Any]:
    """What identifies the weights, and their size."""
    weights = (directory / "model.safetensors").read_bytes()
    return {
        "name": BUNDLED_MODEL,
        "version": json.loads((directory / "inferry-triage.json").read_text())["version"],
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "parameters": _parameters(weights),
        "bytes": sum(path.stat().st_size for path in directory.iterdir()),
        "config": json.loads((directory / "config.json").read_text()),
    }


def _parameters(weights: bytes) -> int:
    """Number of weights by the header of a safetensors file in float16."""
    header_bytes = int.from_bytes(weights[:8], "little")
    return (len(weights) - 8 - header_bytes) // 2
