"""Requests, headers and caller of the steps of composed models."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from inferry.dispatch.gateway import ModelCatalog
from inferry.domain.callers import Caller
from inferry.domain.errors import DeadlineExceeded
from inferry.domain.jobs import InferenceJob
from inferry.domain.values import replace
from inferry.ingress.headers import identifier
from inferry.ingress.idempotency import IDEMPOTENCY_KEY
from inferry.ingress.job_ids import COMPOSED, JOB_ID, MADE_RUN
from inferry.ingress.job_parser import LongPrompt, parse
from inferry.ingress.pooling.decode import PooledEndpoint, PooledRequest
from inferry.ingress.pooling.parse import parse_pooled
from inferry.ingress.run_identity import RunIdentity
from inferry.ingress.wire_format import ClientRequest, DeferredRequest, Endpoint

MAX_IDENTIFIER_CHARS: Final = 256
_KEPT_BYTES: Final = 200
DEADLINE: Final = b"x-inferry-deadline-ms"
FORWARDED_PATH: Final = b":path"
"""The path so far, in the headers of a request that a composed model has forwarded. No client can send this name."""
_RUN, _STEP, _LANE = b"x-inferry-run-id", b"x-inferry-step-id", b"x-inferry-lane"


class _Named(msgspec.Struct):
    model: str


_name_decoder = msgspec.json.Decoder(_Named)


def model_of(body: bytes) -> str | None:
    """The model that a request names; None where it names none."""
    try:
        return _name_decoder.decode(body).model
    except msgspec.DecodeError:
        return None


def shown_path(before: bytes, path: Sequence[str]) -> bytes:
    """The path so far, where one composed model has called another, and then this one's."""
    shown = ">".join(path).encode()
    return b"%b>%b" % (before, shown) if before else shown


def decode_step(endpoint: Endpoint, body: bytes) -> ClientRequest | PooledRequest:
    """The request of a step. Raises InvalidRequest or UnsupportedFeature."""
    if isinstance(endpoint, PooledEndpoint):
        return endpoint.decode_pooled(body)
    decoded = endpoint.decode(body)
    if isinstance(decoded, DeferredRequest):
        return decoded.without_preparation("a step of a composed model has one prompt and is not stored")
    return decoded


def parse_step(
    decoded: ClientRequest | PooledRequest, headers: Mapping[bytes, bytes], models: ModelCatalog, caller: Caller
) -> InferenceJob | LongPrompt:
    """The job of a step, or its long prompt."""
    if isinstance(decoded, PooledRequest):
        return parse_pooled(decoded, headers, models, caller)
    return parse(decoded, headers, models, caller)


def step_headers(
    own: Mapping[bytes, bytes],
    run: RunIdentity,
    call_id: str,
    name: str,
    stage: str,
    lane: str | None,
    left_ms: int | None,
) -> dict[bytes, bytes]:
    """The client's headers with the run, the step, what is left of the deadline, and the name for the ledger."""
    headers = {**own, COMPOSED: f"{name}/{stage}".encode(), _STEP: _joined(run.step_id, stage)}
    if run.run_id == call_id:
        headers[_RUN] = call_id.encode()
        headers[MADE_RUN] = b"1"
    if (key := identifier(own, IDEMPOTENCY_KEY)) is not None:
        headers[IDEMPOTENCY_KEY] = _joined(key, stage)
    if (job_id := own.get(JOB_ID)) is not None:
        headers[JOB_ID] = b"%b-%b" % (job_id, stage.encode())
    if lane is not None:
        headers[_LANE] = lane.encode()
    if left_ms is None:
        headers.pop(DEADLINE, None)
    elif left_ms <= 0:
        raise DeadlineExceeded("the call's deadline passed before its next step")
    else:
        headers[DEADLINE] = b"%d" % left_ms
    return headers


def _joined(name: str, stage: str) -> bytes:
    """An identifier of the stage. Where it would be too long, a hash keeps it apart from others."""
    joined = f"{name}/{stage}".encode()
    if len(joined) <= MAX_IDENTIFIER_CHARS:
        return joined
    return joined[:_KEPT_BYTES] + b"~" + blake2b(joined, digest_size=16).hexdigest().encode()


def with_all_models(caller: Caller) -> Caller:
    """The caller of steps: it was allowed the composed model, and needs no permission for the models behind it."""
    tenant, key = caller.tenant, caller.key
    if tenant.limits.models is not None:
        tenant = replace(tenant, limits=replace(tenant.limits, models=None))
    if key is not None and key.limits.models is not None:
        key = replace(key, limits=replace(key.limits, models=None))
    return Caller(tenant, key, may_list_models=False)
