"""Several processes of one gateway do not share their workers with other gateways, and the error says what to do."""

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.serve import run_server


def test_several_processes_with_shared_workers_are_refused_with_the_alternative() -> None:
    cluster = {"redis": "redis://localhost/0", "listen": "127.0.0.1:8100", "secret_env": "CLUSTER_SECRET"}
    config = parse({"ledger": "postgresql://inferry@localhost/inferry", "cluster": cluster})
    with pytest.raises(ConfigError, match=r"each with its own port and its own cluster\.listen"):
        run_server(config, "127.0.0.1", 0, 2)
