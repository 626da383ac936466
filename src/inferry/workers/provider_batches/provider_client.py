"""Requests to a provider's batch API. A temporary error is WorkerLost, any other ProviderRefused."""

from typing import Any

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.domain.provider_batches import ProviderRefused
from inferry.workers.http_client import Client
from inferry.workers.openai_http.server_client import ServerClient

MAX_RESULT_BYTES = 256 * 1024 * 1024
"""Results of one batch. The gateway's batches are small enough for answers of 50 kB on average."""
TIMEOUT_S = 60.0
TRANSFER_TIMEOUT_S = 600.0
_TEMPORARY = frozenset({408, 409, 425, 429})


class ProviderClient:
    """`headers` are sent with every request; secrets among them appear nowhere else."""

    def __init__(self, worker: str, url: str, headers: dict[str, str], connect_timeout_s: float) -> None:
        self._worker = worker
        self._client = Client(url, headers, connect_timeout_s)
        self._server = ServerClient(self._client, MAX_RESULT_BYTES)

    async def get(self, path: str, timeout_s: float = TIMEOUT_S) -> bytes:
        status, body = await self._server.get(path.encode(), b"", timeout_s)
        return self._checked(status, body)

    async def get_json(self, path: str) -> Any:
        return self._decoded(await self.get(path))

    async def post(self, path: str, content_type: bytes, body: bytes, timeout_s: float = TIMEOUT_S) -> Any:
        headers = b"content-type: %b\r\n" % content_type
        status, answer = await self._server.post_once(path.encode(), headers, body, timeout_s)
        return self._decoded(self._checked(status, answer))

    async def post_json(self, path: str, value: object, timeout_s: float = TIMEOUT_S) -> Any:
        return await self.post(path, b"application/json", msgspec.json.encode(value), timeout_s)

    def close(self) -> None:
        self._client.close()

    def _checked(self, status: int, body: bytes) -> bytes:
        if 200 <= status < 300:
            return body
        if status in _TEMPORARY or status >= 500:
            raise WorkerLost(f"worker {self._worker}: the batch API answered {status}")
        # The text of the answer is left out: it may quote a prompt.
        raise ProviderRefused(f"worker {self._worker}: the batch API answered {status}")

    def _decoded(self, body: bytes) -> Any:
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            raise WorkerLost(f"worker {self._worker}: the batch API answered with something else than JSON") from None


def count(value: object) -> int:
    """A number of tokens, as far as the provider reports one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


class ProviderBatches:
    """What the batch APIs of all providers have in common; see `domain.provider_batches.BatchProvider`."""

    def __init__(
        self, client: ProviderClient, *, worker: str, models: tuple[str, ...], pool: str | None, price_factor: float
    ) -> None:
        self._client = client
        self.worker = worker
        self.models = models
        self.pool = pool
        self.price_factor = price_factor
