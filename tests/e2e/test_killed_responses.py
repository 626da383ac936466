"""`kill -9` of a real gateway while background responses run: each has one result, charged once."""

import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from openai import OpenAI

from support.killed_batches import LIMIT_S, Engine, Gateway

RESPONSES = 40


@pytest.mark.parametrize("seed", [1, 2])
def test_every_background_response_has_one_result_charged_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Engine() as engine:
        gateway = Gateway(tmp_path, engine.upstream.url)
        with client(gateway) as api:
            questions = {
                api.responses.create(
                    model="m", input=f"q{number}", background=True, extra_headers={"x-inferry-run-id": "night"}
                ).id: f"q{number}"
                for number in range(RESPONSES)
            }
        for _ in range(2):
            time.sleep(rng.uniform(0.0, 0.1))
            gateway.stop(signal.SIGKILL)
            gateway = Gateway(tmp_path, engine.upstream.url)
        try:
            with client(gateway) as api:
                for id, question in questions.items():
                    assert result(api, id) == f"echo {question}"
        finally:
            gateway.stop(signal.SIGTERM)
    charged = charges(tmp_path / "inferry.db")
    assert set(charged.values()) == {1}
    assert len(charged) == RESPONSES


def client(gateway: Gateway) -> OpenAI:
    return OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)


def result(api: OpenAI, id: str) -> str:
    end = time.monotonic() + LIMIT_S
    while (response := api.responses.retrieve(id)).status != "completed":
        assert response.status in ("queued", "in_progress"), response
        assert time.monotonic() < end
        time.sleep(0.02)
    return response.output_text


def charges(database: Path) -> Counter[str]:
    """How many rows of the ledger have a cost, by response."""
    query = "SELECT job_id FROM attempts WHERE run_id = 'night' AND cost_nanos > 0"
    with closing(sqlite3.connect(database)) as connection:
        return Counter(job.rpartition("-")[0] for (job,) in connection.execute(query))
