"""`inferry profile`: tables, files and error messages."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli.main import app

SMALL = ["--device", "cpu", "--batch-sizes", "1,2", "--context", "16", "--prompt-tokens", "8", "--steps", "1"]


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["profile", *words], env={"COLUMNS": "200"})


def test_a_profile_is_printed_and_written(tiny_model: Path, tmp_path: Path) -> None:
    kept, page = tmp_path / "p.json", tmp_path / "p.html"
    done = invoke(str(tiny_model), *SMALL, "--threads", "1", "--json", str(kept), "--html", str(page))
    assert done.exit_code == 0, done.output
    for text in ("decode steps", "prefill steps", "matrix products", "idle and launch gaps", "GB/s", "By roofline"):
        assert text in done.output
    found = json.loads(kept.read_text())
    assert found["format"] == "inferry-profile/1"
    assert [(one["phase"], one["batch"]) for one in found["points"]] == [
        ("decode", 1),
        ("decode", 2),
        ("prefill", 1),
        ("prefill", 2),
    ]
    assert set(found["versions"]) == {"inferry", "python", "torch", "triton", "numpy"}
    assert found["settings"]["threads"] == 1
    drawn = page.read_text()
    assert drawn.count("<polyline") == 2 * (3 + 1 + 2)
    assert drawn.count("<rect") == 2 * 2 * 6


def test_a_directory_with_config_json_alone_needs_random_weights(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    refused = invoke(str(tmp_path), *SMALL)
    assert refused.exit_code == 2
    assert "--random-weights needs config.json only" in refused.output
    done = invoke(str(tmp_path), *SMALL, "--random-weights")
    assert done.exit_code == 0, done.output
    assert "random weights" in done.output


def test_the_bundled_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke("bundled", *SMALL)
    assert done.exit_code == 0, done.output
    assert "triage in float32" in done.output
    monkeypatch.setattr("inferry.cli.profile.BUNDLED_DIRECTORY", tmp_path)
    assert "has no bundled model: install inferry again" in invoke("bundled", *SMALL).output


def test_mistakes_are_named(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferry.engine.runner.cuda_memory", lambda: None)
    model = str(tiny_model)
    for words, complaint in (
        (["/absent"], "no such directory: /absent; the bundled model is named bundled"),
        ([str(tmp_path), "--random-weights"], "has no config.json"),
        ([model, "--device", "cuda"], "torch finds no GPU"),
        ([model, "--batch-sizes", "2,1"], "do not ascend"),
        ([model, "--context", "99999"], "above the model's context"),
        ([model, "--json", "/absent/p.json"], "no such directory: /absent"),
    ):
        done = invoke(*words)
        assert done.exit_code == 2, done.output
        assert complaint in done.output


def test_too_little_memory_is_said(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferry.engine.runner.cpu_memory", lambda: (1 << 20, 1 << 20))
    done = invoke(str(tiny_model), *SMALL)
    assert done.exit_code == 1
    assert "not enough memory for 2 sequences of 16 tokens" in done.output
    assert "more than the 0.25 GiB available" in done.output


def test_a_missing_extra_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inferry.engine.profiling.session", None)
    done = invoke(str(tiny_model), *SMALL)
    assert done.exit_code == 2
    assert "pip install 'inferry[engine]'" in done.output
