"""Adapters in the engine's loop: limits, requests for adapters that are not loaded, and unloading beside calls."""

from pathlib import Path

from inferry.engine.adapter_control import AdapterControl
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import AdapterChanged, Rejected, Request
from inferry.engine.peft_config import UnsupportedAdapter
from inferry.engine.prefix_keys import next_key, root_key
from support.engine_fixtures import FakeRunner, drain, greedy

CONFIG = EngineConfig(max_sequences=4, kv_tokens=256, chunk_tokens=16, block_tokens=4)


class FakeStore:
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def load(self, adapter: int, directory: Path) -> None:
        if directory.name == "malformed":
            raise TypeError("'list' object is not a mapping")
        if directory.name == "broken":
            raise UnsupportedAdapter("use_dora: not supported")
        self.loaded.append(adapter)

    def unload(self, adapter: int) -> None:
        self.loaded.remove(adapter)


def a_control(limit: int = 2) -> tuple[EngineCore, FakeStore, AdapterControl]:
    core, store = EngineCore(FakeRunner(CONFIG), CONFIG), FakeStore()
    return core, store, AdapterControl(core, store, limit)


def a_request(key: int, adapter: int) -> Request:
    return Request(key, [1, 2, 3], greedy(5), 0, adapter=adapter)


def test_requests_for_adapters_that_are_not_loaded_are_rejected() -> None:
    _, _, control = a_control()
    refused = Rejected(1, False, "the adapter is not loaded")
    assert control.rejection(a_request(1, 0)) is None
    assert control.rejection(a_request(1, 7)) == refused
    assert control.load(7, "somewhere") == AdapterChanged(7)
    assert control.rejection(a_request(1, 7)) is None
    control.unload(7)
    assert control.rejection(a_request(1, 7)) == refused


def test_a_malformed_adapter_is_refused_and_the_engine_goes_on() -> None:
    _, store, control = a_control()
    assert control.load(7, "malformed") == AdapterChanged(7, "loading failed (TypeError)")
    assert control.load(8, "somewhere") == AdapterChanged(8)
    assert store.loaded == [8]


def test_an_adapter_is_unloaded_after_the_last_sequence_that_uses_it() -> None:
    core, store, control = a_control()
    for adapter in (7, 8):
        control.load(adapter, "somewhere")
    for key, adapter in enumerate((0, 7, 7, 8)):
        assert core.add(a_request(key, adapter)) is None
    core.step()
    control.unload(7)
    assert control.unloaded() == []
    core.abort([1])
    assert control.unloaded() == []
    assert store.loaded == [7, 8]
    core.abort([2])
    assert control.unloaded() == [AdapterChanged(7)]
    assert control.unloaded() == []
    assert store.loaded == [8]
    drain(core)
    control.unload(8)
    assert control.unloaded() == [AdapterChanged(8)]
    control.unload(8)
    assert control.unloaded() == []


def test_no_more_adapters_are_loaded_than_there_are_places() -> None:
    core, store, control = a_control(limit=1)
    assert control.load(1, "broken") == AdapterChanged(1, "use_dora: not supported")
    assert control.load(2, "somewhere") == AdapterChanged(2)
    full = AdapterChanged(3, "max_adapters 1: there is no place for another adapter")
    assert control.load(3, "somewhere") == full
    assert core.add(a_request(1, 2)) is None
    control.unload(2)
    assert control.unloaded() == []
    assert control.load(3, "somewhere") == full  # the place is in use until the sequence ends
    drain(core)
    control.unloaded()
    assert control.load(3, "somewhere") == AdapterChanged(3)
    assert store.loaded == [3]
    without = AdapterControl(core, None, 0)
    assert without.load(1, "somewhere") == AdapterChanged(1, "max_adapters 0: there is no place for another adapter")


def test_the_chain_of_block_keys_starts_from_the_adapter() -> None:
    roots = {root_key(salt, adapter) for salt in (None, "", "a", "b") for adapter in (0, 1, 2)}
    assert len(roots) == 12
    assert root_key("a", 1) != next_key(root_key("a"), [1, 0])
