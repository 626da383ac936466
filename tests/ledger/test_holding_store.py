"""What gateways hold, in the database: generations fence writes, and a rebuild sees everything that may be spent."""

from collections.abc import Callable, Iterator

import pytest

from inferry.domain.shared_limits import Holding
from inferry.domain.spending import Spending
from inferry.ledger.stores.holdings import KEPT_S, HoldingStore

SPENDING = [Spending(tenant="a", period="day", tokens=7, nanos=0, at=1.0)]


@pytest.fixture
def open_store(ledger_url: str) -> Iterator[Callable[[], HoldingStore]]:
    opened: list[HoldingStore] = []

    def make() -> HoldingStore:
        opened.append(HoldingStore(ledger_url, lambda: SPENDING))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def test_a_write_of_another_generation_changes_nothing(open_store: Callable[[], HoldingStore]) -> None:
    store = open_store()
    assert store.read("gw") == (0, {})
    assert store.write("gw", 1, {"x": 5}, 1.0) == 0
    assert store.begin_rebuild(1.0) == (1, [], SPENDING)
    assert store.write("gw", 1, {"x": 5, "y": 2**53 - 1}, 1.0) == 1
    assert open_store().begin_rebuild(1.0)[0] == 2
    assert store.write("gw", 1, {"x": 9}, 1.0) == 2
    assert store.read("gw") == (2, {"x": 5, "y": 2**53 - 1})


def test_a_rebuild_returns_what_every_gateway_holds(open_store: Callable[[], HoldingStore]) -> None:
    first, second = open_store(), open_store()
    first.begin_rebuild(1.0)
    first.write("a", 1, {"x": 5, "y": 1}, 1.0)
    second.write("b", 1, {"x": 3}, 1.0)
    first.write("a", 1, {"x": 6, "y": 0}, 2.0)
    generation, held, spending = second.begin_rebuild(2.0)
    assert (generation, sorted(held), spending) == (2, [Holding("a", "x", 6), Holding("b", "x", 3)], SPENDING)


def test_holdings_older_than_every_period_are_deleted(open_store: Callable[[], HoldingStore]) -> None:
    store = open_store()
    store.begin_rebuild(0.0)
    store.write("dead", 1, {"x": 5}, 1.0)
    assert store.begin_rebuild(1.0 + KEPT_S)[1] == [Holding("dead", "x", 5)]
    assert store.begin_rebuild(2.0 + KEPT_S)[1] == []
