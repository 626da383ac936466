"""`inferry models check`: what is said about a checkpoint, and the exit status."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from inferry.cli.config.workers import EmbeddedWorkerConfig
from inferry.cli.engine_settings import engine_config
from inferry.cli.formats import parse_bytes
from inferry.cli.main import app
from inferry.engine.checkpoint import read_config
from inferry.engine.config import DEVICE_DEFAULTS, Device
from inferry.engine.dtypes import resolve_dtype
from inferry.engine.memory import MemoryModel, fitted
from inferry.engine.model_check import Budget, check_model

GIB = 1 << 30


def check(directory: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "check", str(directory), *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def report(directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status, output = check(directory, "--json", *options)
    return status, json.loads(output)


@pytest.fixture
def changed(tiny_model: Path, tmp_path: Path) -> Any:
    """A copy of the random model with another config."""

    def change(**settings: Any) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(tiny_model, directory, dirs_exist_ok=True)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return directory

    return change


def test_the_mode_of_the_worker_is_part_of_the_estimate(tiny_model: Path) -> None:
    """Padded decodes copy the keys of up to 128 blocks in one layer; the others keep their scores by block."""
    found = {
        mode: report(tiny_model, "--device", "cpu", "--memory", "4GiB", "--context", "1024", "--mode", mode)[1][
            "memory"
        ]
        for mode in ("continuous", "hybrid", "dynamic", "static")
    }
    assert found["continuous"] == found["hybrid"]
    assert found["static"] == found["dynamic"]
    assert found["static"]["workspace_bytes"] != found["continuous"]["workspace_bytes"]


def test_a_model_that_can_be_served(tiny_model: Path) -> None:
    status, found = report(tiny_model, "--device", "cpu", "--memory", "2GiB")
    assert status == 0
    assert (found["family"], found["dtype"], found["rope"]) == ("Llama", "float32", "default")
    assert (found["unsupported"], found["missing"]) == ([], [])
    assert found["tasks"] == ["embed", "generate", "score"]
    assert found["has_tokenizer"]
    assert found["has_chat_template"]
    memory = found["memory"]
    assert memory["budget_bytes"] == int(0.8 * 2 * GIB)
    assert memory["total_bytes"] <= memory["budget_bytes"]
    assert set(memory["recommended"]) == {"kv_tokens", "context_tokens", "max_sequences"}


def test_tables_name_the_same_facts(tiny_model: Path) -> None:
    status, output = check(tiny_model, "--device", "cpu", "--memory", "2GiB")
    assert status == 0
    for text in ("LlamaForCausalLM", "KV cache per token", "max_sequences", "1.60 GiB", "can serve this model"):
        assert text in output


def test_the_rows_below_memory_add_up(tiny_model: Path) -> None:
    memory = report(tiny_model, "--device", "cpu", "--memory", "2GiB")[1]["memory"]
    parts = ("weight", "adapter", "kv_cache", "workspace", "graph", "runtime")
    assert sum(memory[f"{part}_bytes"] for part in parts) == memory["total_bytes"]
    output = check(tiny_model, "--device", "cpu", "--memory", "2GiB")[1]
    sizes = dict(re.findall(r"(weights|KV cache|workspace|runtime|all) +│ +([\d.]+) GiB", output))
    assert sum(float(sizes.pop(name)) for name in list(sizes) if name != "all") == pytest.approx(
        float(sizes["all"]), abs=0.02
    )


def test_a_path_that_is_no_directory_is_named_as_such(tmp_path: Path) -> None:
    assert check(tmp_path / "none") == (2, f"inferry: there is no directory {tmp_path / 'none'}\n")
    (tmp_path / "file").touch()
    assert check(tmp_path / "file") == (2, f"inferry: {tmp_path / 'file'} is not a directory\n")
    assert "has no config.json" in check(tmp_path)[1]


def test_every_unsupported_setting_and_missing_file_is_listed(changed: Any) -> None:
    directory = changed(mlp_bias=True, hidden_act="gelu", quantization_config={"quant_method": "awq"})
    (directory / "tokenizer.json").unlink()
    (directory / "model.safetensors").unlink()
    status, found = report(directory)
    assert status == 1
    assert [reason.split(":")[0] for reason in found["unsupported"]] == [
        "quantization_config",
        "hidden_act gelu",
        "mlp_bias",
    ]
    assert len(found["missing"]) == 2
    assert found["memory"] is None
    assert "unsupported: mlp_bias" in check(directory)[1]


def test_the_latency_profile_and_an_own_share_use_less_memory(tiny_model: Path) -> None:
    budgets = [
        report(tiny_model, "--device", "cpu", "--memory", "8GiB", *options)[1]["memory"]["budget_bytes"]
        for options in ((), ("--profile", "latency"), ("--share", "0.2"))
    ]
    assert budgets == [int(share * 8 * GIB) for share in (0.8, 0.25, 0.2)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_recommendation_is_what_kv_tokens_of_auto_allocate(tiny_model: Path, device: Device) -> None:
    found = report(tiny_model, "--device", device, "--memory", "4GiB")[1]["memory"]
    model = read_config(tiny_model)
    memory = MemoryModel(model, resolve_dtype("auto", model.dtype, device), device)
    config = engine_config(
        EmbeddedWorkerConfig(kv_tokens="auto", max_sequences=found["recommended"]["max_sequences"]), device
    )
    assert fitted(memory, config, 4 * GIB, 4 * GIB).kv_tokens == found["recommended"]["kv_tokens"]


def test_a_gpu_computes_in_the_dtype_of_the_checkpoint(changed: Any) -> None:
    directory = changed(torch_dtype="bfloat16")
    on_gpu = report(directory, "--device", "cuda", "--memory", "80GiB")[1]["memory"]
    on_cpu = report(directory, "--device", "cpu", "--memory", "80GiB")[1]["memory"]
    assert (on_gpu["dtype"], on_cpu["dtype"]) == ("bfloat16", "float32")
    assert 2 * on_gpu["kv_token_bytes"] == on_cpu["kv_token_bytes"]


def test_the_workspace_is_that_of_the_devices_own_step(tiny_model: Path) -> None:
    on_gpu = DEVICE_DEFAULTS["cuda"]
    found = report(tiny_model, "--device", "cuda", "--memory", "80GiB")[1]["memory"]
    budget = Budget(device="cuda", device_bytes=80 << 30, share=0.8, call_tokens=2048)
    expected = check_model(tiny_model, on_gpu, budget).memory
    small = check_model(tiny_model, replace(on_gpu, chunk_tokens=256), budget).memory
    assert expected is not None
    assert small is not None
    assert found["workspace_bytes"] == expected.workspace_bytes != small.workspace_bytes


@pytest.mark.parametrize(("device", "memory"), [("cpu", "8GiB"), ("cuda", "80GiB")])
def test_a_window_is_computed_on_both_devices(changed: Any, device: str, memory: str) -> None:
    directory = changed(architectures=["MistralForCausalLM"], sliding_window=4096)
    assert report(directory, "--device", device, "--memory", memory)[0] == 0


def test_a_model_that_does_not_fit_is_unusable(tiny_model: Path) -> None:
    status, output = check(tiny_model, "--device", "cpu", "--memory", "300MiB")
    assert status == 1
    assert "does not fit into the budget" in output


def test_the_bundled_model_has_a_name() -> None:
    status, found = report(Path("bundled"), "--device", "cpu", "--memory", "8GiB")
    assert (status, found["unsupported"], found["missing"]) == (0, [], [])


def test_a_directory_without_a_config_is_a_usage_error(tmp_path: Path) -> None:
    status, output = check(tmp_path)
    assert status == 2
    assert "no config.json" in output
    assert check(tmp_path, "--memory", "many")[0] == 2


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 * GIB), ("24 gb", 24 * 10**9), ("1.5MiB", 3 << 19), ("77", 77)]
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert parse_bytes(text) == count
