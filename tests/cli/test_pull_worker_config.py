"""The configuration of `inferry worker`."""

from pathlib import Path

import pytest

from inferry.cli.config.loader import load
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import HttpWorkerConfig
from inferry.cli.pull_worker import check_addresses, worker_config

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


def test_the_variables_of_the_command_are_no_keys_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text('workers: [{kind: vllm, name: far, url: "http://127.0.0.1:1", models: [m]}]')
    monkeypatch.setenv("INFERRY_WORKER_KEY", "a key of pull-workers")
    monkeypatch.setenv("INFERRY_CLUSTER__REDIS", "redis://127.0.0.1:6379/0")
    config = worker_config(file, None, "vllm", None, None, "far")
    assert [worker.name for worker in config.workers] == ["far"]
    assert config.cluster.redis is None
    monkeypatch.delenv("INFERRY_CLUSTER__REDIS")
    assert load(None).cluster == config.cluster, "a gateway may have the worker key in its environment"


@pytest.mark.parametrize(
    ("redis", "gateway", "named"),
    [
        ("nonsense", "http://127.0.0.1:1", "--redis must be of the form"),
        ("redis://127.0.0.1:99999/0", "http://127.0.0.1:1", "--redis must be of the form"),
        ("redis://127.0.0.1:6379/0?foo=bar", "http://127.0.0.1:1", "--redis must be of the form"),
        ("redis://127.0.0.1:6379/abc", "http://127.0.0.1:1", "--redis must be of the form"),
        ("redis://127.0.0.1:6379/0", "http://127.0.0.1:99999", "--gateway is not a URL"),
    ],
)
def test_an_address_that_is_none_is_named(redis: str, gateway: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_addresses(redis, [gateway])


@pytest.mark.parametrize("redis", ["redis://h", "redis://:p@h:6379/", "rediss://u:p@h:1/15", "unix:///run/r.sock?db=2"])
def test_an_address_of_redis_is_accepted(redis: str) -> None:
    check_addresses(redis, ["http://127.0.0.1:8000", "https://gateway"])
