"""The configuration of `inferry worker`."""

from pathlib import Path

import pytest

from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import HttpWorkerConfig
from inferry.cli.pull_worker import worker_config

UNSALTED = ["sglang", "tgi", "trtllm", "llamacpp", "transformers"]


def an_upstream(kind: str, isolation: str | None = None) -> HttpWorkerConfig:
    config = worker_config(None, "http://127.0.0.1:1", kind, isolation, "m", "gpu")
    (worker,) = config.workers
    assert isinstance(worker, HttpWorkerConfig)
    return worker


@pytest.mark.parametrize("kind", UNSALTED)
def test_an_engine_that_cannot_salt_its_cache_is_used_where_the_command_says_that_tenants_share_it(kind: str) -> None:
    worker = an_upstream(kind, "none")
    assert (worker.__struct_config__.tag, worker.isolation) == (kind, "none")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"kind {kind} cannot salt its prefix cache.*--isolation none"):
        an_upstream(kind)


def test_other_kinds_need_no_isolation() -> None:
    assert an_upstream("vllm").isolation == "salt"  # type: ignore[attr-defined]
    assert an_upstream("vllm", "none").isolation == "none"  # type: ignore[attr-defined]
    assert an_upstream("openai").models == ("m",)
    with pytest.raises(ConfigError, match="isolation"):
        an_upstream("vllm", "some")


def test_a_file_says_itself_what_its_workers_share(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--isolation belongs to --upstream"):
        worker_config(tmp_path / "inferry.yaml", None, "vllm", "none", None, "gpu")
