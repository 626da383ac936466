"""A scrape of a gateway that has served many tenants: its size, and the tenants that it looks up."""

import http.client
import json
import re
from contextlib import closing
from pathlib import Path

from support.scripted_gateway import ScriptedGateway
from support.waiting import until

FEW, MANY = 10, 1000
CALL = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3})


def call_as(gateway: ScriptedGateway, tenants: range) -> None:
    """One call of each tenant, in a run of its own; once more while the disk is too slow to reserve for it."""
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120)) as connection:
        for number in tenants:
            headers = {"x-inferry-tenant": f"tenant-{number}", "x-inferry-run-id": f"run-{number}"}

            def answered(headers: dict[str, str] = headers) -> bool:
                connection.request("POST", "/v1/chat/completions", CALL, headers)
                response = connection.getresponse()
                assert response.read()
                assert response.status in (200, 503)
                return response.status == 200

            until(answered)


def scrape(gateway: ScriptedGateway) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120)) as connection:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()


def looked_up(gateway: ScriptedGateway) -> list[str]:
    """The tenants that one scrape looks up. It is made on the gateway's loop, so that no sample is between."""
    asked: list[str] = []

    def weight_of(tenant: str) -> float:
        asked.append(tenant)
        return 1.0

    async def render() -> None:
        metrics = gateway.service.app._metrics
        metrics.tenants.weight_of = weight_of
        metrics.render()

    gateway.run(render())
    return asked


def test_a_scrape_after_calls_of_a_thousand_tenants_has_the_size_of_one_after_ten(tmp_path: Path) -> None:
    limits = {"day_token_ceiling": 10**6, "requests_per_minute": 1000, "max_concurrent_runs": 10}
    config = {"tenants": {f"tenant-{number}": limits for number in range(MANY)}}
    with ScriptedGateway(tmp_path, config) as gateway:
        call_as(gateway, range(FEW))
        few = scrape(gateway)
        call_as(gateway, range(FEW, MANY))
        many = scrape(gateway)
        tenants = looked_up(gateway)
    # A few ratios are shown once there are enough calls, and values have more digits after more of them.
    assert len(many.splitlines()) <= len(few.splitlines()) + 10
    assert len(many) < 1.1 * len(few)
    assert not re.search(rb"tenant-\d|run-\d", many)
    assert FEW < len(tenants) == len(set(tenants)) <= MANY
