"""The Execute port: stored work runs through the gateway's own endpoints, as the tenant and key that it belongs to."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.ingress.errors import error_body
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.internal_call import call as call_endpoint
from inferry.ingress.job_ids import JOB_ID


class KnownCallers(Protocol):
    """The tenants and keys of the moment."""

    def stored_caller(self, tenant: str, key_id: str | None) -> Caller:
        """The caller that a stored call belongs to. Raises InvalidApiKey where its key is no longer valid."""
        ...


class StoredCalls:
    """Makes stored calls."""

    def __init__(self, serve: Callable[[Request, Reply], None], paths: Collection[str], callers: KnownCallers) -> None:
        self._serve = serve
        self._paths = frozenset(paths)
        self._callers = callers

    def paths(self) -> frozenset[str]:
        return self._paths

    async def call(self, call: StoredCall) -> CallAnswer:
        try:
            caller = self._callers.stored_caller(call.tenant, call.key_id)
        except GatewayError as error:
            return CallAnswer(
                status=error.status, body=error_body(error), code=error.code, retry_after_s=error.retry_after_s
            )
        named = (
            (b"x-inferry-lane", call.lane),
            (b"x-inferry-run-id", call.run_id),
            (b"x-inferry-step-id", call.step_id),
        )
        headers = {**call.headers, JOB_ID: call.job_id.encode()}
        headers |= {name: value.encode() for name, value in named if value is not None}
        answer = await call_endpoint(self._serve, call.path.encode(), call.body, headers, caller, call.on_piece)
        found = _header_values(answer.headers)
        after_ms = found.get(b"retry-after-ms")
        return CallAnswer(
            status=answer.status,
            body=answer.body,
            code=_text(found.get(b"x-inferry-drop-reason")),
            request_id=_text(found.get(b"x-request-id")),
            retry_after_s=None if after_ms is None else int(after_ms) / 1000,
        )


def _header_values(lines: bytes) -> Mapping[bytes, bytes]:
    pairs = (line.split(b": ", 1) for line in lines.split(b"\r\n") if line)
    return {pair[0].lower(): pair[1] for pair in pairs if len(pair) == 2}


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
