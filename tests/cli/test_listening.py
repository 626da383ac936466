import pytest

from inferry.cli.config.schema import ConfigError
from inferry.cli.listening import bind


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_another_gateway_of_several_processes_uses_is_refused(processes: int) -> None:
    listening = bind("127.0.0.1", 0, 2)
    try:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match="cannot serve on"):
            bind("127.0.0.1", port, processes)
    finally:
        for sock in listening.sockets:
            sock.close()
