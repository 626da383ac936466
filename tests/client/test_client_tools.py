"""Tools of a run, timed by the client and told to the gateway at the end of the run."""

from collections.abc import Iterator

import pytest

from inferry.client import Client
from support.scripted_model import ScriptedModelGateway

HELLO = "Hello"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        ScriptedModelGateway(tmp_path_factory.mktemp("tools")) as gateway,
        Client(gateway.url, api_key=gateway.key("acme")) as client,
    ):
        yield client


def test_tools_are_timed(client: Client) -> None:
    now = 7.0
    with client.run() as run:
        run.complete(HELLO, model="m", max_tokens=4)
        run.tools.clock = lambda: now
        for _ in range(2):
            with run.tool("search"):
                now += 1.25
        with pytest.raises(ValueError), run.tool("write"):
            now += 0.5
            raise ValueError
    found = {name: (tool.calls, tool.errors, tool.seconds) for name, tool in run.tools.by_name.items()}
    assert found == {"search": (2, 0, 2.5), "write": (1, 1, 0.5)}
    status = run.status()
    assert status["status"] == "finished"
    assert status["tools"] == {
        "search": {"calls": 2, "errors": 0, "seconds": 2.5},
        "write": {"calls": 1, "errors": 1, "seconds": 0.5},
    }


def test_the_report_of_many_tools_is_one_that_the_gateway_takes(client: Client) -> None:
    with client.run() as run:
        run.complete(HELLO, model="m", max_tokens=4)
        for number in range(40):
            run.tools.add(f"tool {number}", float(number))
        for name in ("", "x" * 65, "a\nb", "\ud800"):
            run.tools.add(name, 99.0)
        run.tools.add("werkzeug é 日" + "x" * 52, 100.0)
    status = run.status()
    assert status["status"] == "finished"
    assert set(status["tools"]) == {"werkzeug é 日" + "x" * 52, *(f"tool {number}" for number in range(9, 40))}
