"""Mistakes in a configuration are errors with place and reason."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferry.cli.config.loader import load, load_workers, parse
from inferry.cli.config.schema import ConfigError

VLLM = {"kind": "vllm", "name": "gpu-a", "url": "http://10.0.0.5:8000"}


def error_of(raw: Any, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(raw, env)
    return str(caught.value)


def error_in(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, env={})
    return str(caught.value)


# -- keys that stand twice -------------------------------------------------------------------------------------------


def test_a_key_that_stands_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    said = error_in(tmp_path / "inferry.yaml", "server:\n  port: 8000\n  host: 127.0.0.1\n  port: 9000\n")
    assert "key `port` in line 4 was set before, in line 2" in said


def test_a_tenant_that_stands_twice_does_not_lose_its_ceiling(tmp_path: Path) -> None:
    text = "tenants:\n  acme:\n    day_token_ceiling: 1000\n  acme: {}\n"
    assert "key `acme` in line 4" in error_in(tmp_path / "inferry.yaml", text)


def test_a_section_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    assert "key `server`" in error_in(tmp_path / "inferry.yaml", "server: {port: 1}\nserver: {port: 2}\n")


def test_the_same_key_in_two_mappings_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "inferry.yaml"
    path.write_text("tenants:\n  a: {max_concurrent: 1}\n  b: {max_concurrent: 2}\n")
    assert set(load(path, env={}).tenants) == {"a", "b"}


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "inferry.yaml"
    path.write_text("workers:\n  - &one {kind: vllm, name: a, url: 'http://h:1'}\n  - {<<: *one, name: b}\n")
    assert [worker.name for worker in load(path, env={}).workers] == ["a", "b"]


def test_a_workers_file_with_a_key_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text("- kind: vllm\n  name: a\n  url: http://h:1\n  url: http://h:2\n")
    with pytest.raises(ConfigError, match="key `url` in line 4"):
        load_workers(path)


def test_an_environment_variable_with_a_key_twice_is_an_error() -> None:
    assert "INFERRY_LANES__P0" in error_of({}, {"INFERRY_LANES__P0": "{share: 0, share: 0.5}"})


@pytest.mark.parametrize("text", ["[" * 5000, "server: {port: 2001-99-99}"])
def test_yaml_that_cannot_be_read_is_no_traceback(tmp_path: Path, text: str) -> None:
    assert "inferry.yaml" in error_in(tmp_path / "inferry.yaml", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server:\n  port: 1\n host: a\n", "line 3, column 2: expected <block end>, but found '<block mapping start>'"),
        ("server: {admin_key: s3cret, [", "line 1, column 30: "),
        ("server: {port: \0}", "special characters are not allowed, at character 16"),
    ],
)
def test_an_error_of_yaml_names_file_and_place_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "inferry.yaml"
    said = error_in(path, text)
    assert said.startswith(f"{path} is not valid YAML: {expected}")
    assert not re.search(r"\n|<unicode string>|s3cret", said)


# -- values of which only some are valid ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"workers": [{**VLLM, "kind": "vlm"}]},
            "workers[0].kind: Invalid value 'vlm'; valid: embedded, vllm, sglang, ",
        ),
        ({"workers": [{**VLLM, "role": "x"}]}, "workers[0].role: Invalid enum value 'x'; valid: both, prefill, decode"),
        (
            {"lanes": {"P1": {"may_preempt": ["P5"]}}},
            "lanes.P1.may_preempt[0]: Invalid enum value 'P5'; valid: P0, P1, P2",
        ),
        ({"tenants": {"a": {"max_lane": "P5"}}}, "tenants.a.max_lane: Invalid enum value 'P5'; valid: P0, P1, P2"),
    ],
)
def test_an_invalid_value_is_refused_with_the_valid_ones(raw: Any, expected: str) -> None:
    assert error_of(raw).startswith(expected)


# -- lanes -----------------------------------------------------------------------------------------------------------


def test_shares_of_lanes_add_up_to_no_more_than_one() -> None:
    said = error_of({"lanes": {"P1": {"share": 0.6}, "P2": {"share": 0.5}}})
    assert "lanes.P1.share" in said
    assert "1.1" in said
    parse({"lanes": {"P1": {"share": 0.5}, "P2": {"share": 0.5}, "P0": {"share": 0.0}}})


# -- URLs of workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://h:1/\r\nx: y", "control"),
        ("http://h :1", "spaces"),
        (" http://h:1", "spaces"),
        ("http://h:1\t", "control"),
        ("http://user:secret@h:1", "user name or password"),
        ("http://@h:1", "user name or password"),
        ("http://", "no host"),
        ("http://:8000", "no host"),
        ("ftp://h:1", "scheme `ftp`"),
        ("h:8000", "must be of the form"),
        ("http://h:99999", "port"),
        ("http://h:0", "port 0"),
        ("http://h:1?key=1", "query"),
        ("http://[::1", "invalid host or port"),
        ("http://bücher.example", "non-ASCII"),
    ],
)
def test_a_worker_whose_url_cannot_be_called_is_an_error_with_the_reason(url: str, reason: str) -> None:
    said = error_of({"workers": [{**VLLM, "url": url}]})
    assert "workers[0].url" in said
    assert reason in said
    assert "secret" not in said


@pytest.mark.parametrize("url", ["http://h:8000", "https://api.example.com", "http://[::1]:8000", "http://h/v1"])
def test_a_worker_at_a_plain_url_is_accepted(url: str) -> None:
    parse({"workers": [{**VLLM, "url": url}]})


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_workers_file_that_is_no_regular_file_is_an_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "workers.yaml"
    make(path)
    with pytest.raises(ConfigError, match=f"cannot read {path}: not a regular file"):
        load_workers(path)


# -- values that cannot be -------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        ({"single_flight": {"replay_ttl_s": INF}}, "single_flight.replay_ttl_s"),
        ({"single_flight": {"replay_ttl_s": NAN}}, "single_flight.replay_ttl_s"),
        ({"server": {"drain_timeout_s": INF}}, "server.drain_timeout_s"),
        ({"server": {"max_body_bytes": 10**400}}, "server.max_body_bytes"),
        ({"server": {"max_body_bytes": -1}}, "server.max_body_bytes"),
        ({"server": {"port": True}}, "server.port"),
        ({"server": {"port": 99999}}, "server.port"),
        ({"server": {"port": -1}}, "server.port"),
        ({"server": {"heartbeat_interval_s": True}}, "server.heartbeat_interval_s"),
        ({"server": {"host": "a b"}}, "server.host"),
        ({"server": {"host": ""}}, "server.host"),
        ({"server": {"host": "a..b"}}, "server.host"),
        ({"server": {"host": "h\n"}}, "server.host"),
        ({"server": {"admin_key": "0123456789abcdef\r\nx: y"}}, "server.admin_key"),
        ({"workers": [{**VLLM, "api_key": "k\r\nx-other: 1"}]}, "workers[0].api_key"),
        ({"workers": [{**VLLM, "api_key": "ключ"}]}, "workers[0].api_key"),
        ({"workers": [{**VLLM, "api_key": "two words"}]}, "workers[0].api_key"),
        ({"workers": [{**VLLM, "kind": "openai", "api_keys": ["sk-a", "sk-\u20ac"]}]}, "workers[0].api_keys[1]"),
        ({"workers": [{**VLLM, "salt_secret": "a\ud800"}]}, "workers[0].salt_secret"),
        ({"server": {"admin_key": "0123456789abcdef\ud800"}}, "server.admin_key"),
        ({"prices": {"a\ud800": {}}}, "prices"),
        ({"workers": [{**VLLM, "models": ["a\nb"]}]}, "workers[0].models[0]"),
        ({"workers": [{**VLLM, "models": [""]}]}, "workers[0].models"),
        ({"workers": [{**VLLM, "group": "a\x00"}]}, "workers[0].group"),
        ({"workers": [{**VLLM, "group": ""}]}, "workers[0].group"),
        ({"prices": {"a\nb": {"input": 1.0}}}, "prices"),
        ({"prices": {"m": {"input": NAN}}}, "prices.m.input"),
        ({"lanes": {"P0": {"ttft_ms": INF}}}, "lanes.P0.ttft_ms"),
        ({"workers_file": ""}, "workers_file"),
        ({"tenants": {"t": {"requests_per_minute": True}}}, "tenants.t.requests_per_minute"),
        ({"tenants": {"t": {"day_money_ceiling": INF}}}, "tenants.t.day_money_ceiling"),
        ({"tenants": {"t": {"models": ["a\x1b[31m"]}}}, "tenants.t.models[0]"),
    ],
)
def test_an_invalid_value_is_reported_with_its_path(raw: dict[str, Any], where: str) -> None:
    assert where in error_of(raw)


@pytest.mark.parametrize("lanes", [{"P2": {"ttft_ms": 60_000}}, {"P2": {"itl_ms": 500}}])
def test_a_lane_has_both_targets_or_neither(lanes: dict[str, Any]) -> None:
    assert "lanes.P2.ttft_ms and lanes.P2.itl_ms must be set together" in error_of({"lanes": lanes})
    assert "lanes.P0.ttft_ms" in error_of({"lanes": {"P0": {"ttft_ms": None}}})


def test_an_error_repeats_nothing_of_a_secret() -> None:
    assert "hush" not in error_of({"workers": [{**VLLM, "api_key": "hush\n"}]})
    assert "hush" not in error_of({"workers": [{**VLLM, "api_key": "hush\u20ac"}]})


@pytest.mark.parametrize(
    ("text", "where", "key"),
    [
        ("tenants: {1: {}}", "tenants", "1"),
        ("tenants: {off: {}}", "tenants", "False"),
        ("tenants: {~: {}}", "tenants", "None"),
        ("prices: {2026-01-01: {}}", "prices", "2026-01-01"),
        ("workers: [{kind: vllm-inprocess, name: a, model: m, engine_args: {1: 2}}]", "workers[0].engine_args", "1"),
        ("workers: [{kind: vllm-inprocess, name: a, model: m, engine_args: {a: {1.5: 2}}}]", "engine_args.a", "1.5"),
    ],
)
def test_a_key_that_is_not_text_is_named_with_the_fix(tmp_path: Path, text: str, where: str, key: str) -> None:
    said = error_in(tmp_path / "inferry.yaml", text)
    assert f"{where}: the key {key} is read as " in said
    assert said.endswith("not as text; write it in quotes")


@pytest.mark.parametrize("text", ["1: {}", "server: {1: 2}", "lanes: {0: {}}", "workers: [{kind: vllm, 1: 2}]"])
def test_a_key_that_is_not_text_is_unknown_where_keys_are_fixed(tmp_path: Path, text: str) -> None:
    assert error_in(tmp_path / "inferry.yaml", text).startswith("unknown key `")


# -- the ledger's address --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite:///", "sqlite://"])
def test_a_ledger_without_a_file_is_an_error_with_the_fix(url: str) -> None:
    said = error_of({"ledger": url})
    assert said.startswith("ledger")
    assert "sqlite:///inferry.db" in said
    assert ":memory:" in said


@pytest.mark.parametrize("url", ["sqlite:///file:x?mode=memory&uri=true", "sqlite:///x.db?mode=memory", "sqlite:///d/"])
def test_a_ledger_that_is_in_memory_by_other_names_is_an_error(url: str) -> None:
    assert error_of({"ledger": url}).startswith("ledger")


def test_an_in_memory_ledger_is_reported() -> None:
    assert parse({"ledger": "sqlite:///:memory:"}).ledger == "sqlite:///:memory:"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"histories": {"m": {}}, "storage": {"store": "never"}}, "storage.store: never forbids"),
        ({"histories": {"m": {"threshold": 1.0}}}, "histories.m.threshold must be above 0 and below 1"),
        ({"histories": {"m": {"keep_messages": 0}}}, "histories.m.keep_messages"),
        ({"histories": {"m": {"keep": 3}}}, "keep"),
    ],
)
def test_wrong_histories_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(raw)
