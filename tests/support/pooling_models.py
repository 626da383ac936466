"""Pooling models made from the random one: its base model, and one with a classification head."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.random_model import ensure_random_model


def embedding_model(directory: Path, *, pooling: str = "mean_tokens") -> Path:
    """The random model without its head, with the files that Sentence Transformers writes."""
    weights = _copy(directory, "LlamaModel")
    del weights["lm_head.weight"]
    names = {name: name.removeprefix("model.") for name in weights}
    save_file({names[name]: one for name, one in weights.items()}, directory / "model.safetensors", {"format": "pt"})
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "2_Normalize").mkdir()
    (directory / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 256, f"pooling_mode_{pooling}": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return directory


def scoring_model(directory: Path, labels: int = 1, **more: object) -> Path:
    """The random model with a classification head instead of its own. `more` are fields of its configuration."""
    weights = _copy(directory, "LlamaForSequenceClassification", num_labels=labels, **more)
    del weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(7)
    weights["score.weight"] = torch.randn(labels, 256, generator=generator) * 0.05
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def _copy(directory: Path, architecture: str, **more: object) -> dict[str, torch.Tensor]:
    shutil.copytree(ensure_random_model(directory.parent / "random"), directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture], **more}))
    weights: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return weights
