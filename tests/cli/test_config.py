"""A YAML file gives a complete configuration, or an error with place and reason."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from inferry.cli import wiring, worker_wiring
from inferry.cli.config.loader import dump, load, parse
from inferry.cli.config.schema import Config, ConfigError, LaneConfig, ServerConfig
from inferry.cli.config.workers import (
    HTTP_KINDS,
    EmbeddedWorkerConfig,
    HttpWorkerConfig,
    VllmInProcessWorkerConfig,
    VllmWorkerConfig,
)
from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy

VLLM = {"kind": "vllm", "name": "gpu-a", "url": "http://10.0.0.5:8000"}


def error_of(raw: Any, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(raw, env)
    return str(caught.value)


# -- defaults --------------------------------------------------------------------------------------------------------


def test_an_empty_configuration_is_valid() -> None:
    defaults = parse({})
    assert defaults == Config()
    assert (defaults.server.host, defaults.server.port) == ("127.0.0.1", 8000)
    assert defaults.workers == (EmbeddedWorkerConfig(),)
    assert defaults.ledger == "sqlite:///inferry.db"
    assert defaults.lane_policies() == DEFAULT_LANES


def test_without_a_file_only_the_environment_counts() -> None:
    assert load(env={}) == Config()
    assert load(env={"INFERRY_SERVER__PORT": "1"}).server.port == 1


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "{}", "null"])
def test_an_empty_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    path = tmp_path / "inferry.yaml"
    path.write_text(text)
    assert load(path, env={}) == Config()


def test_a_lane_keeps_its_defaults_for_missing_keys() -> None:
    policies = parse({"lanes": {"P2": {"share": 0.2, "ttft_ms": 60_000, "itl_ms": 500}}}).lane_policies()
    assert policies[Lane.P2] == msgspec.structs.replace(DEFAULT_LANES[Lane.P2], share=0.2, ttft_ms=60_000, itl_ms=500)
    assert policies[Lane.P0] == DEFAULT_LANES[Lane.P0]


def test_null_removes_an_slo_target() -> None:
    policy = parse({"lanes": {"P0": {"ttft_ms": None, "itl_ms": None}}}).lane_policies()[Lane.P0]
    assert (policy.ttft_ms, policy.itl_ms) == (None, None)


def test_every_key_of_a_lane_is_part_of_its_policy() -> None:
    assert set(LaneConfig.__struct_fields__) <= set(LanePolicy.__struct_fields__)


def test_a_worker_is_built_from_its_kind() -> None:
    workers = parse({"workers": [{"kind": "embedded", "models": ["m"]}, VLLM]}).workers
    assert workers == (
        EmbeddedWorkerConfig(models=("m",)),
        VllmWorkerConfig(name="gpu-a", url="http://10.0.0.5:8000"),
    )


@pytest.mark.parametrize("kind", HTTP_KINDS, ids=lambda kind: str(kind.__struct_config__.tag))
def test_every_kind_over_http_takes_the_keys_they_have_in_common(kind: type[HttpWorkerConfig]) -> None:
    raw = {**VLLM, "kind": kind.__struct_config__.tag, "max_sequences": 7, "inter_token_timeout_s": 3, "pool": "a"}
    (worker,) = parse({"workers": [raw]}).workers
    assert worker == kind(name="gpu-a", url="http://10.0.0.5:8000", max_sequences=7, inter_token_timeout_s=3, pool="a")
    assert "workers[0].inter_token_timeout_s must be above 0" in error_of(
        {"workers": [{**raw, "inter_token_timeout_s": 0}]}
    )
    assert "workers[0].url must be of the form" in error_of({"workers": [{**raw, "url": "10.0.0.5"}]})


def test_a_batch_api_requires_the_names_of_its_models() -> None:
    hosted = {**VLLM, "kind": "openai", "batch_api": "openai", "models": []}
    assert "workers[0].batch_api requires workers[0].models" in error_of({"workers": [hosted]})
    wrong = {**hosted, "models": ["m"], "batch_price_factor": -0.5}
    assert "workers[0].batch_price_factor must be at least 0" in error_of({"workers": [wrong]})


def test_api_key_and_api_keys_exclude_each_other() -> None:
    hosted = {**VLLM, "kind": "openai", "api_key": "a", "api_keys": ["b"]}
    assert "mutually exclusive" in error_of({"workers": [hosted]})


def test_secrets_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = {**VLLM, "kind": "openai", "api_keys": ["$UPSTREAM_KEY", "sk-plain"]}
    found = parse({"workers": [hosted, {**VLLM, "name": "b", "salt_secret": "sk-salt"}]})
    assert "$UPSTREAM_KEY" in dump(found)
    assert "sk-" not in dump(found)
    worker = found.workers[0]
    assert isinstance(worker, HttpWorkerConfig)
    monkeypatch.delenv("UPSTREAM_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment variable UPSTREAM_KEY is not set"):
        worker_wiring.http_worker(worker, SystemClock(), found.lane_policies())
    monkeypatch.setenv("UPSTREAM_KEY", "sk-env")
    made = worker_wiring.http_worker(worker, SystemClock(), found.lane_policies())
    assert made._keys.secrets == ("sk-env", "sk-plain")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        parse({}).server.port = 1  # type: ignore[misc]


# -- unknown keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"sever": {}}, "unknown key `sever`; did you mean `server`?"),
        ({"server": {"prot": 1}}, "unknown key `server.prot`; did you mean `port`?"),
        ({"lanes": {"p0": {}}}, "unknown key `lanes.p0`; did you mean `P0`?"),
        (
            {"lanes": {"P1": {"coalesce": 5}}},
            "unknown key `lanes.P1.coalesce`; did you mean `coalesce_ms`?",
        ),
        (
            {"workers": [{"kind": "embedded", "chunk_token": 5}]},
            "unknown key `workers[0].chunk_token`; did you mean `chunk_tokens`?",
        ),
        (
            {"workers": [VLLM, {**VLLM, "name": "b", "apikey": "x"}]},
            "unknown key `workers[1].apikey`; did you mean `api_key`?",
        ),
    ],
)
def test_an_unknown_key_is_reported_with_its_path_and_a_suggestion(raw: Any, message: str) -> None:
    assert error_of(raw) == message


def test_an_unknown_key_without_a_similar_one_is_reported_with_all_known_keys() -> None:
    known = ", ".join(Config.__struct_fields__)
    assert error_of({"zzz": 1}) == f"unknown key `zzz`; known keys are {known}"
    assert error_of({"lanes": {"batch": {}}}) == "unknown key `lanes.batch`; known keys are P0, P1, P2"


def test_a_worker_has_only_the_keys_of_its_kind() -> None:
    message = error_of({"workers": [{**VLLM, "threads": 2}]})
    assert message.startswith("unknown key `workers[0].threads`")
    message = error_of({"workers": [{"kind": "embedded", "api_key": "x"}]})
    assert message.startswith("unknown key `workers[0].api_key`")


def test_a_key_that_is_no_text_is_unknown_too() -> None:
    assert error_of({1: 2}).startswith("unknown key `1`")


# -- wrong types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"server": {"port": "8000"}}, "server.port: Expected `int`, got `str`"),
        ({"server": {"port": True}}, "server.port: Expected `int`, got `bool`"),
        ({"server": {"host": None}}, "server.host: Expected `str`, got `null`"),
        ({"server": None}, "server: Expected `object`, got `null`"),
        ({"server": [1]}, "server: Expected `object`, got `array`"),
        ({"lanes": {"P0": 5}}, "lanes.P0: Expected `object`, got `int`"),
        ({"lanes": {"P0": {"max_wait_ms": None}}}, "lanes.P0.max_wait_ms: Expected `float`, got `null`"),
        (
            {"lanes": {"P2": {"window": "maybe"}}},
            "lanes.P2.window: Invalid enum value 'maybe'; valid: adaptive, fixed, off",
        ),
        ({"workers": {}}, "workers: Expected `array`, got `object`"),
        ({"workers": ["local"]}, "workers[0]: Expected `object`, got `str`"),
        ({"workers": [{"name": "x"}]}, "workers[0]: Object missing required field `kind`"),
        ({"workers": [{"kind": "vllm", "name": "x"}]}, "workers[0]: Object missing required field `url`"),
        ({"workers": [{**VLLM, "models": "m"}]}, "workers[0].models: Expected `array`, got `str`"),
        ({"workers": [{**VLLM, "models": [1]}]}, "workers[0].models[0]: Expected `str`, got `int`"),
        ({"ledger": 5}, "ledger: Expected `str`, got `int`"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_path(raw: Any, message: str) -> None:
    assert error_of(raw) == message


@pytest.mark.parametrize(("raw", "kind"), [([], "a list"), ("text", "text"), (5, "int"), (None, "NoneType")])
def test_only_a_mapping_is_a_configuration(raw: Any, kind: str) -> None:
    assert error_of(raw) == f"the configuration must be a mapping of keys, not {kind}"


# -- impossible values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"server": {"port": 65_536}}, "server.port must be between 0 and 65535"),
        ({"server": {"port": -1}}, "server.port must be between 0 and 65535"),
        ({"server": {"max_body_bytes": 0}}, "server.max_body_bytes must be above 0"),
        ({"server": {"body_timeout_s": 0}}, "server.body_timeout_s must be above 0"),
        ({"server": {"idle_timeout_s": -1}}, "server.idle_timeout_s must be above 0"),
        ({"server": {"heartbeat_interval_s": 0}}, "server.heartbeat_interval_s must be above 0"),
        ({"server": {"drain_timeout_s": -1}}, "server.drain_timeout_s must be at least 0"),
        ({"lanes": {"P0": {"max_wait_ms": -1, "coalesce_ms": -2}}}, "lanes.P0.max_wait_ms must be at least 0"),
        ({"lanes": {"P0": {"coalesce_ms": -1}}}, "lanes.P0.coalesce_ms must be at least 0"),
        (
            {"lanes": {"P0": {"coalesce_ms": 30}}},
            "lanes.P0.coalesce_ms (30) is longer than lanes.P0.max_wait_ms (25), which bounds it",
        ),
        ({"lanes": {"P1": {"max_batch": 0}}}, "lanes.P1.max_batch must be at least 1"),
        ({"lanes": {"P1": {"queue_limit": 0}}}, "lanes.P1.queue_limit must be at least 1"),
        ({"lanes": {"P1": {"high_watermark": 0}}}, "lanes.P1.high_watermark must be above 0 and at most 1"),
        ({"lanes": {"P1": {"high_watermark": 1.2}}}, "lanes.P1.high_watermark must be above 0 and at most 1"),
        ({"server": {"max_queued_bytes": 0}}, "server.max_queued_bytes must be above 0"),
        ({"lanes": {"P2": {"share": 1}}}, "lanes.P2.share must be at least 0 and below 1"),
        ({"lanes": {"P2": {"share": -0.1}}}, "lanes.P2.share must be at least 0 and below 1"),
        ({"lanes": {"P2": {"reserve": 1}}}, "lanes.P2.reserve must be at least 0 and below 1"),
        ({"single_flight": {"linger_ms": 60_001}}, "single_flight.linger_ms must be between 0 and 60000"),
        ({"single_flight": {"replay_ttl_s": 0}}, "single_flight.replay_ttl_s must be above 0"),
        ({"single_flight": {"replay_max_bytes": -1}}, "single_flight.replay_max_bytes must not be negative"),
        ({"lanes": {"P0": {"ttft_ms": 0}}}, "lanes.P0.ttft_ms must be above 0"),
        ({"lanes": {"P0": {"itl_ms": -5}}}, "lanes.P0.itl_ms must be above 0"),
        ({"workers": []}, "workers is empty"),
        ({"workers": [VLLM, VLLM]}, "workers[1].name `gpu-a` is used by an earlier worker"),
        (
            {"workers": [{**VLLM, "url": "10.0.0.5:8000"}]},
            "workers[0].url must be of the form http://HOST:PORT or https://HOST",
        ),
        ({"workers": [{**VLLM, "max_sequences": 0}]}, "workers[0].max_sequences must be at least 1"),
        ({"workers": [{**VLLM, "media_tokens": -1}]}, "workers[0].media_tokens must be at least 0"),
        ({"workers": [{**VLLM, "media": ["pictures"]}]}, "workers[0].media[0]: Invalid enum value 'pictures'"),
        ({"server": {"max_prompts": 0}}, "server.max_prompts must be above 0"),
        ({"workers": [{**VLLM, "prefill_tokens": 0}]}, "workers[0].prefill_tokens must be at least 1"),
        ({"workers": [{"kind": "embedded", "chunk_tokens": 0}]}, "workers[0].chunk_tokens must be at least 1"),
        ({"workers": [{"kind": "embedded", "threads": 0}]}, "workers[0].threads must be at least 1"),
    ],
)
def test_an_invalid_value_is_refused(raw: Any, message: str) -> None:
    assert message in error_of(raw).split("; ")


def test_all_config_errors_are_reported_together() -> None:
    message = error_of({"server": {"port": -1, "heartbeat_interval_s": 0}, "workers": []})
    assert len(message.split("; ")) == 3


def test_an_api_key_is_in_no_message() -> None:
    assert "sk-secret" not in error_of({"workers": [{**VLLM, "url": "nowhere", "api_key": "sk-secret"}]})


# -- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("INFERRY_SERVER__PORT", "9000", "server.port", 9000),
        ("INFERRY_SERVER__HOST", "0.0.0.0", "server.host", "0.0.0.0"),
        ("INFERRY_SERVER__HEARTBEAT_INTERVAL_S", "2.5", "server.heartbeat_interval_s", 2.5),
        ("INFERRY_LANES__P2__SHARE", "0.2", "lanes.P2.share", 0.2),
        ("INFERRY_LANES__P0__GROUPS", "null", "lanes.P0.groups", None),
        ("INFERRY_LANES__P1__WINDOW", "fixed", "lanes.P1.window", "fixed"),
        ("INFERRY_LEDGER", "sqlite:///elsewhere.db", "ledger", "sqlite:///elsewhere.db"),
    ],
)
def test_a_variable_sets_one_key(name: str, text: str, path: str, value: object) -> None:
    found: Any = parse({}, {name: text})
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_a_variable_wins_over_the_file_and_leaves_its_neighbours() -> None:
    raw = {"server": {"port": 1, "host": "::1"}}
    server = parse(raw, {"INFERRY_SERVER__PORT": "2"}).server
    assert (server.port, server.host) == (2, "::1")
    assert raw == {"server": {"port": 1, "host": "::1"}}, "what was given is not changed"


def test_a_variable_that_would_set_nothing_is_an_error() -> None:
    hint = "the environment variable INFERRY_PORT sets no configuration key; did you mean INFERRY_SERVER__PORT?"
    assert error_of({}, {"INFERRY_PORT": "1"}) == hint
    unknown = "the environment variable INFERRY_LOG_LEVEL sets no configuration key"
    assert error_of({}, {"INFERRY_LOG_LEVEL": "debug"}) == unknown


@pytest.mark.parametrize("name", ["SERVER__PORT", "OTHER_SERVER__PORT", "PATH"])
def test_a_variable_that_is_not_ours_is_left_alone(name: str) -> None:
    assert parse({}, {name: "1"}) == Config()


def test_a_variable_is_checked_like_the_file() -> None:
    assert error_of({}, {"INFERRY_SERVER__PROT": "1"}) == "unknown key `server.prot`; did you mean `port`?"
    assert error_of({}, {"INFERRY_SERVER__PORT": "many"}) == "server.port: Expected `int`, got `str`"
    assert error_of({}, {"INFERRY_SERVER__PORT": "-1"}) == "server.port must be between 0 and 65535"


def test_an_environment_variable_cannot_set_a_key_below_a_scalar() -> None:
    message = error_of({"workers": [VLLM]}, {"INFERRY_WORKERS__NAME": "x"})
    assert message == "INFERRY_WORKERS__NAME sets a key below workers, which is not a mapping"


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "inferry.yaml"
    path.write_text("server:\n  port: 9000\nworkers:\n  - {kind: vllm, name: a, url: 'http://h:1'}\n")
    found = load(path, env={})
    assert found.server.port == 9000
    assert found.workers == (VllmWorkerConfig(name="a", url="http://h:1"),)


@pytest.mark.parametrize("text", ["server: [", "a: b: c", "\tserver: {}", "x: !!python/object:os.system {}"])
def test_invalid_yaml_is_reported_on_one_line_with_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "inferry.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, env={})
    assert str(caught.value).startswith(f"{path} is not valid YAML: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file or directory"):
        load(tmp_path / "nowhere.yaml", env={})
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load(tmp_path, env={})


# -- printing it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"workers": [VLLM, {"kind": "embedded", "threads": 2, "models": ["a", "b"]}]},
        {
            "lanes": {"P0": {"ttft_ms": None, "itl_ms": None}, "P2": {"window": "off", "share": 0.3}},
            "server": {"port": 0},
        },
    ],
)
def test_the_printed_configuration_reads_back_equal(raw: Any) -> None:
    before = parse(raw)
    after = parse(yaml.safe_load(dump(before)))
    assert (after.server, after.workers, after.ledger) == (before.server, before.workers, before.ledger)
    assert after.lane_policies() == before.lane_policies()


def test_the_printed_configuration_names_every_key() -> None:
    printed = yaml.safe_load(dump(parse({"workers": [{"kind": "embedded"}, VLLM]})))
    assert set(printed) == set(Config.__struct_fields__)
    assert set(printed["server"]) == set(ServerConfig.__struct_fields__)
    assert set(printed["lanes"]["P1"]) == set(LaneConfig.__struct_fields__)
    assert set(printed["workers"][0]) == {"kind", *EmbeddedWorkerConfig.__struct_fields__}
    assert set(printed["workers"][1]) == {"kind", *VllmWorkerConfig.__struct_fields__}


def test_secrets_are_not_printed() -> None:
    printed = dump(parse({"workers": [{**VLLM, "api_key": "sk-secret"}, {**VLLM, "name": "b"}]}))
    assert "sk-secret" not in printed
    assert [worker["api_key"] for worker in yaml.safe_load(printed)["workers"]] == ["***", None]


def test_a_lane_may_stop_running_jobs_of_lower_lanes_alone() -> None:
    lanes = {"P0": {"may_preempt": ["P2"]}, "P2": {"preemptible": True}}
    config = parse({"lanes": lanes})
    assert config.lane_policies()[Lane.P0].may_preempt == (Lane.P2,)
    assert parse(yaml.safe_load(dump(config))).lane_policies() == config.lane_policies()
    assert parse({"lanes": {"P2": {"may_preempt": ["P2"]}}}).lane_policies()[Lane.P2].may_preempt == (Lane.P2,)
    with pytest.raises(ConfigError, match=r"lanes\.P2\.may_preempt names P1, which is a higher lane"):
        parse({"lanes": {"P2": {"may_preempt": ["P1"]}}})


def test_vllm_in_process_needs_a_virtual_environment_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    worker = {"kind": "vllm-inprocess", "name": "v", "model": str(tmp_path), "python": str(tmp_path / "bin/python")}
    with pytest.raises(ConfigError, match=r"no interpreter .*make venv-vllm"):
        wiring.build(parse({"workers": [worker], "ledger": f"sqlite:///{tmp_path}/ledger.db"}))


def test_engine_arguments_of_vllm_are_taken_as_they_are() -> None:
    worker = {"kind": "vllm-inprocess", "name": "v", "model": "m", "engine_args": {"dtype": "float32", "seed": 3}}
    (parsed,) = parse({"workers": [worker]}).workers
    assert isinstance(parsed, VllmInProcessWorkerConfig)
    assert parsed.engine_args == {"dtype": "float32", "seed": 3}
