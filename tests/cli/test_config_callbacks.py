"""The `callbacks` section: defaults that reach no internal address, and mistakes that are named."""

from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.durable.callback_policy import CallbackPolicy


def test_the_defaults_are_those_of_the_policy() -> None:
    assert parse({}).callbacks.policy() == CallbackPolicy()


def test_lists_of_hosts_and_networks() -> None:
    section = {"allowed_hosts": ["*.a.example", "10.2.0.1"], "allowed_networks": ["10.2.0.0/16", "fd00::/8"]}
    policy = parse({"callbacks": section}).callbacks.policy()
    assert policy.allowed_hosts == ("*.a.example", "10.2.0.1")
    assert policy.allowed_networks == (ip_network("10.2.0.0/16"), ip_network("fd00::/8"))


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"allowed_networks": ["10.2.0.1/16"]}, "callbacks.allowed_networks[0]"),
        ({"denied_networks": ["10.0.0.0/8", "x"]}, "callbacks.denied_networks[1]"),
        ({"allowed_hosts": ["Example.com"]}, "callbacks.allowed_hosts[0]"),
        ({"denied_hosts": ["https://a.example"]}, "callbacks.denied_hosts[0]"),
        ({"denied_hosts": ["*"]}, "callbacks.denied_hosts[0]"),
        ({"timeout_s": 0}, "callbacks.timeout_s"),
        ({"initial_backoff_s": 10, "max_backoff_s": 5}, "callbacks.max_backoff_s"),
        ({"retry_for_s": 8 * 86_400}, "callbacks.retry_for_s"),
        ({"ca_file": "/nowhere.pem"}, "callbacks.ca_file"),
        ({"unknown": 1}, "callbacks.unknown"),
    ],
)
def test_a_mistake_is_named_with_its_path(section: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"callbacks": section})
    assert path in str(caught.value)


def test_a_file_without_certificates_is_no_ca_file(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match=r"callbacks\.ca_file"):
        parse({"callbacks": {"ca_file": str(tmp_path / "empty.pem")}})
