"""Request headers at their bounds."""

import pytest

from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest, LaneNotAllowed
from inferry.domain.lanes import Lane
from inferry.domain.tenants import ApiKey, Limits, Tenant
from inferry.ingress.headers import identifier, int_header, lane_of
from inferry.ingress.idempotency import parse_idempotency
from inferry.ingress.run_identity import identity


def a_caller(tenant: Lane = Lane.P0, key: Lane | None = None, default: Lane | None = None) -> Caller:
    limits = Limits() if key is None else Limits(max_lane=key, default_lane=default)
    api_key = ApiKey(key_id="k", tenant="a", secret_hash=b"", limits=limits)
    return Caller(Tenant(name="a", limits=Limits(max_lane=tenant)), None if key is None else api_key)


@pytest.mark.parametrize(
    "caller", [a_caller(Lane.P1), a_caller(Lane.P0, Lane.P1), a_caller(Lane.P1, Lane.P0), a_caller(Lane.P1, Lane.P1)]
)
def test_the_lower_lane_of_tenant_and_key_may_be_asked_for_and_no_higher(caller: Caller) -> None:
    assert lane_of({b"x-inferry-lane": b"P1"}, None, caller) is Lane.P1
    assert lane_of({b"x-inferry-lane": b" p2 "}, None, caller) is Lane.P2
    with pytest.raises(LaneNotAllowed):
        lane_of({b"x-inferry-lane": b"P0"}, None, caller)
    assert lane_of({}, "priority", caller) is Lane.P1, "a tier is a wish"
    assert lane_of({}, "flex", caller) is Lane.P2


def test_a_keys_default_lane_comes_before_its_tenants_and_never_above_what_it_may() -> None:
    assert lane_of({}, None, a_caller()) is Lane.P1
    assert lane_of({}, "auto", a_caller(Lane.P0, Lane.P0, default=Lane.P0)) is Lane.P0
    assert lane_of({}, None, a_caller(Lane.P2, Lane.P0, default=Lane.P0)) is Lane.P2


def test_an_id_has_up_to_256_characters_and_an_empty_one_is_none() -> None:
    assert identifier({b"x": b"a" * 256}, b"x") == "a" * 256
    assert identifier({b"x": b""}, b"x") is None
    assert identifier({b"x": b"..."}, b"x") == "..."
    for wrong in (b"a" * 257, b"a b", b"\x7f", b"\xe9", b".", b".."):
        with pytest.raises(InvalidRequest):
            identifier({b"x": wrong}, b"x")


def test_an_int_header_has_up_to_twelve_ascii_digits_and_may_be_zero() -> None:
    assert int_header({b"x": b"0"}, b"x") == 0
    assert int_header({b"x": b"9" * 12}, b"x") == 10**12 - 1
    for wrong in (b"1" * 13, b"-1", b"1.5", b"", b"\xb2", b"1e3"):
        with pytest.raises(InvalidRequest):
            int_header({b"x": wrong}, b"x")


def test_a_linger_header_of_zero_is_not_taken_for_unset() -> None:
    key = {b"idempotency-key": b"k"}
    said = parse_idempotency(key | {b"x-inferry-linger-ms": b"0"}, None, None)
    unsaid = parse_idempotency(key, None, None)
    assert said is not None
    assert unsaid is not None
    assert (said.linger_s, unsaid.linger_s) == (0.0, None)


def test_a_step_id_without_a_run_id_does_not_identify_a_retry() -> None:
    assert parse_idempotency({}, None, "step") is None
    named = parse_idempotency({}, "run", "step")
    assert named is not None
    assert named.name == "run step"


def test_a_sub_agent_belongs_to_its_own_parent_and_the_first_run_to_the_orchestrator() -> None:
    claude = {b"x-claude-code-session-id": b"s", b"x-inferry-parent-run-id": b"orchestrator"}
    assert identity(claude, "job").parent_run == "orchestrator"
    assert identity(claude | {b"x-claude-code-agent-id": b"a"}, "job").parent_run == "claude-code:s"
    itself = claude | {b"x-inferry-parent-run-id": b"claude-code:s"}
    assert identity(itself, "job").parent_run is None, "nobody is its own parent"
