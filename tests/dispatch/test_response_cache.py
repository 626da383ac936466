"""Cached responses: their TTL, the bounds of the cache, and fair eviction."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.dispatch.singleflight.response_cache import ResponseCache
from inferry.dispatch.values import ENTRY_OVERHEAD_BYTES, CachedResponse
from inferry.domain.streams import Delta, Done, FinishReason, Usage


def an_answer(size: int = 0, *, job_id: str = "j", until: float = 10.0) -> CachedResponse:
    delta = Delta(job_id, "run", "step", 0, "x" * size, (), 1)
    return CachedResponse(
        job_id, b"digest", delta, Done(job_id, FinishReason.STOP, Usage()), was_resumed=False, until=until
    )


def test_a_cached_response_is_found_until_its_ttl() -> None:
    replays = ResponseCache(1 << 20)
    replays.keep(("a", "call"), an_answer(until=10.0))
    assert replays.find(("a", "call"), 9.9) is not None
    assert replays.find(("b", "call"), 9.9) is None
    assert replays.find(("a", "call"), 10.0) is None
    assert replays.expire(9.0) == 10.0
    assert (replays.expire(10.0), replays.used, len(replays)) == (None, 0, 0)


def test_a_new_response_replaces_the_cached_one_and_its_ttl() -> None:
    replays = ResponseCache(1 << 20)
    replays.keep(("a", "call"), an_answer(100, job_id="old", until=10.0))
    replays.keep(("a", "call"), an_answer(job_id="new", until=20.0))
    assert replays.expire(10.0) == 20.0
    found = replays.find(("a", "call"), 10.0)
    assert found is not None
    assert (found.job_id, replays.used) == ("new", ENTRY_OVERHEAD_BYTES)


def test_the_tenant_that_holds_most_is_evicted_first() -> None:
    replays = ResponseCache(10 * ENTRY_OVERHEAD_BYTES)
    replays.keep(("small", "only"), an_answer())
    for number in range(50):
        replays.keep(("large", f"{number}"), an_answer())
    assert replays.find(("small", "only"), 0.0) is not None
    assert replays.find(("large", "49"), 0.0) is not None
    assert replays.find(("large", "40"), 0.0) is None, "the oldest go first"
    assert replays.used == 10 * ENTRY_OVERHEAD_BYTES


def test_a_response_larger_than_the_cache_evicts_nothing() -> None:
    replays = ResponseCache(3 * ENTRY_OVERHEAD_BYTES)
    replays.keep(("a", "call"), an_answer())
    replays.keep(("b", "call"), an_answer(3 * ENTRY_OVERHEAD_BYTES))
    assert replays.find(("a", "call"), 0.0) is not None
    assert replays.find(("b", "call"), 0.0) is None


def test_a_cached_response_does_not_print_its_text() -> None:
    assert "xxx" not in repr(an_answer(10))


@settings(max_examples=100, deadline=None)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("123"), st.integers(0, 3000), st.integers(1, 20)), max_size=40
    )
)
def test_the_cache_stays_within_its_bound_and_counts_its_bytes(acts: list[tuple[str, str, int, int]]) -> None:
    replays = ResponseCache(6 * ENTRY_OVERHEAD_BYTES)
    for now, (tenant, name, size, time_s) in enumerate(acts):
        replays.expire(now)
        replays.keep((tenant, name), an_answer(size, until=now + time_s))
        there = [kept for one in "abc" for two in "123" if (kept := replays.find((one, two), now)) is not None]
        assert replays.used == sum(kept.size for kept in there) <= 6 * ENTRY_OVERHEAD_BYTES
        assert len(replays) == len(there)
    assert replays.expire(1e9) is None
    assert (replays.used, len(replays)) == (0, 0)
