"""The client and a gateway of its own process."""

import os
import signal
from pathlib import Path

import pytest

from inferry.client import Client, Completion, ConnectionFailed
from support.gateway_process import GatewayProcess
from support.scripted_model import ScriptedModelServer

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_gateway_that_dies_is_an_error_and_not_a_short_answer(tmp_path: Path) -> None:
    with ScriptedModelServer() as server:
        worker = {"name": "up", "kind": "vllm", "url": server.url, "models": ["m"]}
        config = {"workers": [worker], "ledger": f"sqlite:///{tmp_path / 'ledger.db'}"}
        with GatewayProcess(tmp_path, config) as gateway, Client(gateway.url) as client:
            run = client.run()
            results = run.batch_complete([f"prompt {number}" for number in range(40)], model="m", max_tokens=4)
            assert all(isinstance(one, Completion) for one in results)
            assert run.status()["jobs"]["done"] == 40
            server.model.stops_after = 2  # so that the call is in flight
            with run.stream(HELLO, model="m") as stream:
                assert next(stream).text
                os.kill(gateway.pid, signal.SIGKILL)
                with pytest.raises(ConnectionFailed):
                    list(stream)
            with pytest.raises(ConnectionFailed):
                run.complete(HELLO, model="m")
