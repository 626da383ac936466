"""Prompts are hazardous material: they reach the engine and the one client, and nothing else."""

import logging
from pathlib import Path

import pytest

from support.scripted_gateway import ScriptedGateway
from support.serving import get, post

CANARY = "canary-5c1d9e"


def test_a_prompt_is_in_no_log_no_metric_and_no_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    messages = [{"role": "user", "content": CANARY}]
    with ScriptedGateway(tmp_path) as gateway:
        call = {"model": "m", "messages": messages}
        assert post(gateway.url, "/v1/chat/completions", call)[0] == 200
        assert post(gateway.url, "/v1/completions", {"model": "m", "prompt": CANARY, "n": 2})[0] == 400
        assert post(gateway.url, "/v1/chat/completions", call | {"temperature": CANARY})[0] == 400
        gateway.worker.dies_after = 0
        assert post(gateway.url, "/v1/chat/completions", call)[0] == 502
        metrics = get(gateway.url, "/metrics")[2]
    assert CANARY not in caplog.text
    assert CANARY not in metrics
    for path in tmp_path.iterdir():
        assert CANARY.encode() not in path.read_bytes(), path


def test_a_job_does_not_print_its_payload(tmp_path: Path) -> None:
    from support.builders import a_job

    job = a_job(body=CANARY.encode())
    assert CANARY not in repr(job)
    assert CANARY not in str(job)
    assert CANARY not in f"{job.payload}"
