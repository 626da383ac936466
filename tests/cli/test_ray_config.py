"""Workers of kind ray in a configuration, and the mistakes that `inferry ray` reports."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli.config.loader import load_workers, parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import RayWorkerConfig
from inferry.cli.main import app
from inferry.cli.ray_wiring import RESEND_INTERVAL_S, ReplicaRequests, scaling_limits
from inferry.cli.worker_wiring import make_worker
from inferry.domain.clock import ManualClock, SystemClock
from support.children import environment

RAY: dict[str, Any] = {"kind": "ray", "name": "fleet", "engine": {"kind": "embedded", "group": "gpu"}}


def test_a_worker_on_ray_takes_its_group_and_models_from_its_engine() -> None:
    config = parse({"workers": [{**RAY, "min_replicas": 0, "max_replicas": 3}]})
    (worker,) = config.workers
    assert (worker.group, worker.models, worker.pool) == ("gpu", (), None)
    assert scaling_limits(config) == {"gpu": (0, 3)}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([{**RAY, "min_replicas": 2}], "workers[0].min_replicas (2) is above workers[0].max_replicas"),
        ([{**RAY, "max_replicas": 0}], "workers[0].max_replicas"),
        ([{**RAY, "drain_timeout_s": 0}], "workers[0].drain_timeout_s"),
        ([{**RAY, "engine": {"kind": "embedded", "threads": 0}}], "workers[0].engine.threads"),
        ([RAY, {"kind": "embedded", "group": "gpu"}], "workers[0].engine.group `gpu` has other workers"),
        (
            [RAY, {"kind": "ray", "name": "b", "address": "h:1", "engine": {"kind": "embedded"}}],
            "workers[0].address differs",
        ),
        ([RAY, {"kind": "ray", "name": "b", "app": "fleet", "engine": {"kind": "embedded"}}], "workers[0].app `fleet`"),
    ],
)
def test_mistakes_are_named(workers: list[Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"workers": workers})
    assert expected in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("target_wait_s", 0), ("utilization", 1.5), ("scale_down_after_s", -1)])
def test_mistakes_in_the_scaling_section_are_named(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"scaling.{key}"):
        parse({"scaling": {key: value}})


def test_a_number_of_replicas_is_sent_again_after_a_deploy_has_reset_it() -> None:
    (worker,) = parse({"workers": [RAY]}).workers
    assert isinstance(worker, RayWorkerConfig)
    sent: list[tuple[str, int]] = []

    async def play() -> None:
        clock = ManualClock()
        requests = ReplicaRequests(worker, clock)
        for desired, replicas, after_s, expected in (
            (None, 0, 0.0, []),  # no advice yet
            (3, 1, 0.0, [3]),
            (3, 2, 1.0, []),  # one starts
            (3, 3, 60.0, []),
            (3, 1, 1.0, [3]),  # the application was deployed again
            (3, 1, 1.0, []),
            (3, 1, RESEND_INTERVAL_S, [3]),
            (2, 3, 1.0, [2]),  # other advice is sent at once
        ):
            clock.advance(after_s)
            await requests.follow(desired, replicas, lambda app, number: sent.append((app, number)))
            assert sent == [("fleet", number) for number in expected]
            sent.clear()

    asyncio.run(play())


def test_a_workers_file_cannot_have_workers_on_ray(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(json.dumps([RAY]))
    (worker,) = load_workers(path)
    with pytest.raises(ConfigError, match="kind ray is for workers of the configuration itself"):
        make_worker(worker, SystemClock())


def test_a_configuration_without_workers_on_ray_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"workers": [{"kind": "embedded"}]}))
    result = CliRunner().invoke(app, ["ray", "deploy", str(path)])
    assert result.exit_code == 2
    assert "has no worker of kind ray" in result.output
    path.write_text(json.dumps({"workers": [RAY]}))
    result = CliRunner().invoke(app, ["ray", "status", str(path), "--worker", "other"])
    assert result.exit_code == 2
    assert "named other" in result.output


def test_ray_is_imported_only_where_it_is_used() -> None:
    code = "import sys, inferry.cli.main; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_gateways_that_share_redis_cannot_use_ray() -> None:
    with pytest.raises(ConfigError, match=r"kind ray cannot be used with cluster\.redis"):
        parse({"workers": [RAY], "cluster": {"redis": "redis://127.0.0.1:6379/0"}})
