"""Anthropic's Message Batches.

They have no metadata: the marker begins every `custom_id`, which is shown with the results only. So a batch whose
creation was not answered is looked for among those of the same size, once they have ended.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.domain.provider_batches import ProviderRequest, ProviderResult, ProviderState
from inferry.workers.provider_batches.provider_client import TRANSFER_TIMEOUT_S, ProviderBatches, count

PATHS = frozenset({"/v1/messages"})
VERSION = "2023-06-01"
CLOCK_SKEW_S = 3600.0
PAGE, MAX_PAGES = 100, 100
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""Statuses of errors; of any other error it is 500."""


class AnthropicBatches(ProviderBatches):
    """See `domain.provider_batches.BatchProvider`."""

    paths = PATHS

    async def submit(self, marker: str, path: str, requests: Sequence[ProviderRequest]) -> str:
        body = {"requests": [{"custom_id": one.custom_id, "params": msgspec.Raw(one.body)} for one in requests]}
        batch = await self._client.post_json("/v1/messages/batches", body, TRANSFER_TIMEOUT_S)
        return str(batch["id"])

    async def find(self, marker: str, since: float, count: int) -> str | None:
        after = ""
        is_undecided = False
        for _ in range(MAX_PAGES):
            page = await self._client.get_json(f"/v1/messages/batches?limit={PAGE}{after}")
            for batch in page["data"]:
                if _created_at(batch) < since - CLOCK_SKEW_S or sum(batch["request_counts"].values()) != count:
                    continue
                if batch["processing_status"] != "ended":
                    is_undecided = True
                elif batch.get("results_url") is not None and await self._has_marker(batch["id"], marker):
                    return str(batch["id"])
            if not page.get("has_more") or not page["data"] or _created_at(page["data"][-1]) < since - CLOCK_SKEW_S:
                break
            after = f"&after_id={page['last_id']}"
        if is_undecided:
            raise WorkerLost("a batch that may be the one looked for has not ended")
        return None

    async def state(self, provider_id: str) -> ProviderState:
        batch = await self._client.get_json(f"/v1/messages/batches/{provider_id}")
        return ProviderState(
            has_ended=batch["processing_status"] == "ended", has_expired=batch["request_counts"]["expired"] > 0
        )

    async def results(self, provider_id: str) -> AsyncIterator[ProviderResult]:
        content = await self._client.get(f"/v1/messages/batches/{provider_id}/results", TRANSFER_TIMEOUT_S)
        for line in content.splitlines():
            if line.strip():
                yield _result(line)

    async def cancel(self, provider_id: str) -> None:
        if not (await self.state(provider_id)).has_ended:
            await self._client.post_json(f"/v1/messages/batches/{provider_id}/cancel", {})

    def close(self) -> None:
        self._client.close()

    async def _has_marker(self, provider_id: str, marker: str) -> bool:
        async for one in self.results(provider_id):
            return one.custom_id.startswith(f"{marker}-")
        return False


class _Result(msgspec.Struct):
    type: str
    message: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    custom_id: str
    result: _Result


_line_decoder = msgspec.json.Decoder(_Line)


def _result(line: bytes) -> ProviderResult:
    found = _line_decoder.decode(line)
    result = found.result
    if result.type in ("canceled", "expired"):
        return ProviderResult(custom_id=found.custom_id, outcome=result.type)  # type: ignore[arg-type]
    if result.type != "succeeded":
        kind = str((msgspec.json.decode(result.error).get("error") or {}).get("type"))
        return ProviderResult(custom_id=found.custom_id, status=_STATUSES.get(kind, 500), body=bytes(result.error))
    usage: dict[str, Any] = msgspec.json.decode(result.message).get("usage") or {}
    cached = count(usage.get("cache_read_input_tokens"))
    return ProviderResult(
        custom_id=found.custom_id,
        body=bytes(result.message),
        prompt_tokens=count(usage.get("input_tokens")) + count(usage.get("cache_creation_input_tokens")) + cached,
        cached_tokens=cached,
        output_tokens=count(usage.get("output_tokens")),
    )


def _created_at(batch: dict[str, Any]) -> float:
    return datetime.fromisoformat(batch["created_at"]).timestamp()
