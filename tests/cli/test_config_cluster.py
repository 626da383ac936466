"""The `cluster` section: what is refused, what is advised, what is shown."""

from typing import Any

import pytest

from inferry.cli.config.cluster import advise_on_cluster, split_address
from inferry.cli.config.loader import dump, parse
from inferry.cli.config.schema import ConfigError

LEDGER = "postgresql://inferry@db/inferry"


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"redis": "http://host"}, "cluster.redis must be of the form"),
        ({"redis": "redis://host:port"}, "cluster.redis must be of the form"),
        ({"redis": "redis://host", "ttl_ms": 3001}, "cluster.ttl_ms must be between 300 and 3000"),
        ({"redis": "redis://host", "name": "two words"}, "cluster.name must be"),
        (
            {"redis": "redis://host", "listen": "host", "secret_env": "S"},
            "cluster.listen must be of the form HOST:PORT",
        ),
        ({"redis": "redis://host", "listen": "host:1"}, "cluster.listen requires cluster.secret_env"),
        ({"redis": "redis://host", "advertise": "host:1"}, "require cluster.listen"),
        ({"listen": "host:1"}, "cluster.listen requires cluster.redis"),
    ],
)
def test_invalid_values_are_named(cluster: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse({"ledger": LEDGER, "cluster": cluster})
    assert problem in str(found.value)


def test_workers_of_a_file_can_be_shared() -> None:
    cluster = {"redis": "redis://host", "listen": "host:1", "secret_env": "S"}
    config = parse({"ledger": LEDGER, "cluster": cluster, "workers_file": "workers.yaml"})
    assert (config.workers_file, config.workers) == ("workers.yaml", ())


def test_addresses_have_a_host_and_a_port() -> None:
    assert split_address("host:1") == ("host", 1)
    assert split_address("[::1]:80") == ("::1", 80)


def test_the_password_of_redis_is_not_shown() -> None:
    config = parse({"ledger": LEDGER, "cluster": {"redis": "redis://user:hidden@host:6379/0"}})
    assert "redis://user:***@host:6379/0" in dump(config)
    assert "hidden" not in dump(config)


def test_limits_that_count_per_gateway_are_advised() -> None:
    raw = {"ledger": LEDGER, "cluster": {"redis": "redis://host"}, "tenants": {"a": {"max_kv_tokens": 9}}}
    config = parse(raw)
    advice = list(advise_on_cluster(config.cluster, config.tenants))
    assert advice[0].startswith("cluster.listen is null")
    assert advice[1] == "tenant a: max_kv_tokens counts per gateway, not over all gateways"
    assert list(advise_on_cluster(parse({}).cluster, config.tenants)) == []
