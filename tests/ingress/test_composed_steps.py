"""Headers of the steps of composed models."""

from inferry.ingress.composed_steps import step_headers
from inferry.ingress.headers import identifier
from inferry.ingress.idempotency import IDEMPOTENCY_KEY
from inferry.ingress.run_identity import identity

STEP = b"x-inferry-step-id"


def headers_of(key: str, stage: str) -> dict[bytes, bytes]:
    own = {IDEMPOTENCY_KEY: key.encode(), STEP: key.encode()}
    return step_headers(own, identity(own, "job"), "job", "pair", stage, None, None)


def test_long_keys_of_different_calls_and_stages_stay_different() -> None:
    for name in (IDEMPOTENCY_KEY, STEP):
        found = {
            identifier(headers_of(key, stage), name)
            for key in ("a" * 255 + "b", "a" * 256)
            for stage in ("small", "large")
        }
        assert len(found) == 4


def test_a_short_key_is_readable() -> None:
    assert headers_of("key", "small")[IDEMPOTENCY_KEY] == b"key/small"
