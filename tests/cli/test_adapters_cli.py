"""LoRA adapters in the configuration and on the command line."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import EmbeddedWorkerConfig
from inferry.cli.engine_settings import engine_config
from inferry.cli.main import app
from inferry.cli.worker_wiring import make_worker
from inferry.domain.clock import SystemClock
from support.adapters import make_adapter
from support.scripted_gateway import ScriptedGateway


def inferry(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, 0),
        ({"adapters": {"a": "x", "b": "y"}}, 2),
        ({"adapter_dirs": ("x",)}, 8),
        ({"adapters": {"a": "x"}, "adapter_dirs": ("x",)}, 9),
        ({"adapters": {"a": "x"}, "adapter_dirs": ("x",), "max_adapters": 3}, 3),
    ],
)
def test_places_follow_the_configuration(settings: dict[str, Any], places: int) -> None:
    config = engine_config(EmbeddedWorkerConfig(**settings, max_adapter_rank=24), "cpu")
    assert (config.max_adapters, config.max_adapter_rank) == (places, 24)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"adapters": {"": "x"}}, "adapters contains an empty name"),
        ({"adapters": {"a": "x"}, "models": ["a"]}, "adapters has the name a of"),
        ({"adapters": {"a": "x", "b": "x"}, "max_adapters": 1}, "max_adapters must be at least 2"),
        ({"max_adapters": -1}, "max_adapters must be at least 0"),
        ({"max_adapter_rank": 0}, "max_adapter_rank must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse({"workers": [{"kind": "embedded", **settings}]}, {})


def test_adapters_are_checked_before_an_engine_starts(tiny_model: Path, tmp_path: Path) -> None:
    def made(**adapters: Path) -> tuple[Any, Any]:
        paths = {name: str(path) for name, path in adapters.items()}
        config = EmbeddedWorkerConfig(model=str(tiny_model), models=("tiny",), adapters=paths)
        return make_worker(config, SystemClock())

    worker, tokenizers = made(sql=make_adapter(tmp_path / "sql", tiny_model))
    assert worker.view().adapters == {"sql"}
    assert worker.view().models == {"tiny", "sql"}
    assert [(card.name, card.parent) for card in worker.cards()] == [("tiny", None), ("sql", "tiny")]
    assert tokenizers["sql"] is tokenizers["tiny"]
    with pytest.raises(ConfigError, match="use_dora"):
        made(sql=make_adapter(tmp_path / "dora", tiny_model, use_dora=True))
    with pytest.raises(ConfigError, match="no adapter_config"):
        made(sql=tmp_path)


def test_a_gateway_without_places_refuses_adapters(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        code, shown = inferry("adapters", "load", "sql", str(tmp_path), "--url", gateway.url)
        assert (code, "adapter_dirs" in shown) == (1, True)
        code, shown = inferry("adapters", "unload", "sql", "--url", gateway.url)
        assert (code, "no adapter `sql`" in shown) == (1, True)


def test_the_check_of_a_model_counts_adapters(tiny_model: Path) -> None:
    code, shown = inferry("models", "check", str(tiny_model), "--adapters", "4", "--adapter-rank", "32")
    assert code == 0
    assert "LoRA adapters" in shown
    assert "LoRA adapters" not in inferry("models", "check", str(tiny_model))[1]
