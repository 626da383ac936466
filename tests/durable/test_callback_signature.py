"""Signatures of callbacks: the published vector of Standard Webhooks, and the verifier of the how-to guide."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from inferry.durable.callback_signature import secret_text, sign, signature_headers

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
KEY = base64.b64decode(SECRET.removeprefix("whsec_"))
ID, TIME, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "async-jobs.md"


def test_the_published_vector() -> None:
    assert sign(KEY, ID, TIME, BODY) == SIGNATURE
    assert secret_text(KEY) == SECRET


def test_during_a_rotation_there_is_a_signature_of_every_valid_secret() -> None:
    other = bytes(32)
    headers = signature_headers([other, KEY], ID, TIME, BODY)
    assert headers == {
        "webhook-id": ID,
        "webhook-timestamp": str(TIME),
        "webhook-signature": f"{sign(other, ID, TIME, BODY)} {SIGNATURE}",
    }


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The names that the verifier of the how-to guide defines."""
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "def verify" in block
    )
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    return names


def test_the_verifier_of_the_guide_accepts_what_the_gateway_signs(guide: dict[str, Any]) -> None:
    headers = signature_headers([bytes(32), KEY], ID, TIME, BODY)
    assert guide["verify"](SECRET, headers, BODY, now=TIME + 10) is None


@pytest.mark.parametrize(
    ("changed", "body", "now"),
    [
        ({}, BODY + b" ", TIME),
        ({"webhook-id": "msg_other"}, BODY, TIME),
        ({"webhook-timestamp": str(TIME + 1)}, BODY, TIME),
        ({"webhook-timestamp": "x"}, BODY, TIME),
        ({"webhook-signature": "v1,AAAA v2,AAAA"}, BODY, TIME),
        ({"webhook-signature": ""}, BODY, TIME),
        ({}, BODY, TIME + 301),
        ({}, BODY, TIME - 301),
    ],
)
def test_the_verifier_of_the_guide_refuses_everything_else(
    guide: dict[str, Any], changed: dict[str, str], body: bytes, now: int
) -> None:
    headers = {**signature_headers([KEY], ID, TIME, BODY), **changed}
    with pytest.raises(ValueError, match="callback"):
        guide["verify"](SECRET, headers, body, now=now)
