"""OpenAI's batch API: a file of requests, a batch of that file, and files of results.

The marker is in the batch's metadata, so that a batch whose creation was not answered is found by it.
"""

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from inferry.domain.provider_batches import ProviderRequest, ProviderResult, ProviderState
from inferry.workers.provider_batches.provider_client import TRANSFER_TIMEOUT_S, ProviderBatches, count

MARKER = "inferry_batch"
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
CLOCK_SKEW_S = 3600.0
PAGE, MAX_PAGES = 100, 100
_ENDED = frozenset({"completed", "expired", "cancelled"})
_NOT_EXECUTED = {"batch_expired": "expired", "batch_cancelled": "canceled"}


class OpenAIBatches(ProviderBatches):
    """See `domain.provider_batches.BatchProvider`."""

    paths = PATHS

    async def submit(self, marker: str, path: str, requests: Sequence[ProviderRequest]) -> str:
        lines = b"".join(
            b'{"custom_id":%b,"method":"POST","url":%b,"body":%b}\n'
            % (msgspec.json.encode(one.custom_id), msgspec.json.encode(path), one.body)
            for one in requests
        )
        boundary = secrets.token_hex(16).encode()
        body = (
            b'--%b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--%b\r\ncontent-disposition: form-data; name="file"; filename="%b.jsonl"\r\n'
            b"content-type: application/jsonl\r\n\r\n%b\r\n--%b--\r\n"
        ) % (boundary, boundary, marker.encode(), lines, boundary)
        content_type = b"multipart/form-data; boundary=" + boundary
        file = await self._client.post("/v1/files", content_type, body, TRANSFER_TIMEOUT_S)
        batch = await self._client.post_json(
            "/v1/batches",
            {
                "input_file_id": file["id"],
                "endpoint": path,
                "completion_window": "24h",
                "metadata": {MARKER: marker},
            },
        )
        return str(batch["id"])

    async def find(self, marker: str, since: float, count: int) -> str | None:
        after = ""
        for _ in range(MAX_PAGES):
            page = await self._client.get_json(f"/v1/batches?limit={PAGE}{after}")
            for batch in page["data"]:
                if (batch.get("metadata") or {}).get(MARKER) == marker:
                    return str(batch["id"])
            if not page.get("has_more") or not page["data"] or page["data"][-1]["created_at"] < since - CLOCK_SKEW_S:
                break
            after = f"&after={page['data'][-1]['id']}"
        return None

    async def state(self, provider_id: str) -> ProviderState:
        batch = await self._client.get_json(f"/v1/batches/{provider_id}")
        status = batch["status"]
        if status == "failed":
            errors = ((batch.get("errors") or {}).get("data")) or [{}]
            return ProviderState(has_ended=True, error=str(errors[0].get("code")))
        return ProviderState(has_ended=status in _ENDED, has_expired=status == "expired")

    async def results(self, provider_id: str) -> AsyncIterator[ProviderResult]:
        batch = await self._client.get_json(f"/v1/batches/{provider_id}")
        for file in (batch.get("output_file_id"), batch.get("error_file_id")):
            if file is not None:
                content = await self._client.get(f"/v1/files/{file}/content", TRANSFER_TIMEOUT_S)
                for line in content.splitlines():
                    if line.strip():
                        yield _result(line)

    async def cancel(self, provider_id: str) -> None:
        if not (await self.state(provider_id)).has_ended:
            await self._client.post_json(f"/v1/batches/{provider_id}/cancel", {})

    def close(self) -> None:
        self._client.close()


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw
    request_id: str | None = None


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: dict[str, Any] | None = None


_line_decoder = msgspec.json.Decoder(_Line)


def _result(line: bytes) -> ProviderResult:
    found = _line_decoder.decode(line)
    response = found.response
    if response is None:
        code = str((found.error or {}).get("code"))
        outcome = _NOT_EXECUTED.get(code)
        body = b"" if outcome else msgspec.json.encode({"error": found.error})
        return ProviderResult(custom_id=found.custom_id, outcome=outcome, status=500, body=body)  # type: ignore[arg-type]
    usage = _usage(bytes(response.body))
    return ProviderResult(
        custom_id=found.custom_id,
        status=response.status_code,
        body=bytes(response.body),
        request_id=response.request_id,
        prompt_tokens=count(usage.get("prompt_tokens")),
        cached_tokens=count((usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
        output_tokens=count(usage.get("completion_tokens")),
    )


def _usage(body: bytes) -> dict[str, Any]:
    decoded = msgspec.json.decode(body)
    usage = decoded.get("usage") if isinstance(decoded, dict) else None
    return usage if isinstance(usage, dict) else {}
