"""Roles of workers in the configuration: prefill, decode, both."""

from typing import Any

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import VllmWorkerConfig
from inferry.cli.worker_wiring import http_worker
from inferry.domain.lanes import DEFAULT_LANES
from support.virtual_time import LoopClock, run_virtual


def worker(name: str, role: str | None = None, **fields: Any) -> dict[str, Any]:
    given = {} if role is None else {"role": role}
    return {"kind": "vllm", "name": name, "url": "http://127.0.0.1:1", "models": ["m"], **given, **fields}


@pytest.mark.parametrize(
    "workers",
    [
        [worker("a")],
        [worker("d", "decode")],
        [worker("p", "prefill"), worker("d", "decode")],
        [worker("d", "decode", models=[]), worker("p", "prefill")],
        [worker("p", "prefill", models=[]), worker("d", "decode")],
        [worker("p", "prefill", precision="fp8"), worker("d", "decode", precision="fp8")],
    ],
)
def test_a_prefill_worker_needs_a_decode_worker_of_its_models(workers: list[dict[str, Any]]) -> None:
    assert len(parse({"workers": workers}).workers) == len(workers)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([worker("p", "prefill")], r"workers\[0\]\.role is prefill, but .* role decode for the model m"),
        ([worker("p", "prefill"), worker("a")], r"workers\[0\]\.role is prefill"),
        ([worker("a"), worker("p", "prefill", models=[])], r"workers\[1\]\.role is prefill, .* role decode with"),
        ([worker("d", "decode"), worker("p", "prefill", models=["m", "n"])], "role decode for the model n"),
        ([worker("d", "decode", precision="fp8"), worker("p", "prefill")], "with the same pool and precision"),
        (
            [worker("d", "decode"), worker("p", "prefill", min_prefill_tokens=0)],
            "_tokens must be at least 1",
        ),
        ([worker("d", "decoder")], "role"),
        ([worker("d", "decode", kind="sglang")], "role"),
    ],
)
def test_roles_that_do_not_fit_are_refused(workers: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"workers": workers})


def test_role_and_threshold_reach_the_worker() -> None:
    config = parse({"workers": [worker("d", "decode"), worker("p", "prefill", min_prefill_tokens=77), worker("a")]})

    async def views() -> list[tuple[str, int]]:
        made = [
            http_worker(one, LoopClock(), DEFAULT_LANES) for one in config.workers if isinstance(one, VllmWorkerConfig)
        ]
        return [(one.view().role, one.view().min_prefill_tokens) for one in made]

    assert run_virtual(views()) == [("decode", 1024), ("prefill", 77), ("both", 1024)]
