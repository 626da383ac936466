"""`/admin/scale`: how many workers each group should have, for operators only."""

from collections.abc import Iterator

import pytest

from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import TenantGateway, bearer
from support.waiting import until


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantGateway]:
    with TenantGateway(tmp_path_factory.mktemp("scale"), lambda: ([ScriptedWorker()], {})) as gateway:
        yield gateway


def test_advice_is_given_by_group(gateway: TenantGateway) -> None:
    until(lambda: bool(gateway.as_admin("GET", "/admin/scale").json["groups"]))
    (found,) = gateway.as_admin("GET", "/admin/scale?group=default").json["groups"]
    assert (found["group"], found["current"], found["desired"]) == ("default", 1, 1)
    assert found["reason"] == "the minimum number of workers"
    assert gateway.as_admin("GET", "/admin/scale?group=other").json == {"groups": []}


def test_advice_needs_the_admin_key_and_known_parameters(gateway: TenantGateway) -> None:
    answer = gateway.call("GET", "/admin/scale", headers=bearer(gateway.key("acme")))
    assert (answer.status, answer.code) == (403, "admin_only")
    assert gateway.as_admin("GET", "/admin/scale?colour=red").status == 400
    assert gateway.as_admin("POST", "/admin/scale").status == 405
