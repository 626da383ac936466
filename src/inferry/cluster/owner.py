"""What the owner's side of the link needs of its process."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from inferry.cluster.frames import Catalog
from inferry.domain.callers import Caller
from inferry.domain.jobs import InferenceJob


class Owner(Protocol):
    """What connections need of the process that owns the workers."""

    def catalog(self) -> Catalog:
        """The workers as ingress processes see them."""

    def caller(self, tenant: str, key_id: str | None) -> Caller:
        """The caller of a job that is to be admitted here. Raises InvalidApiKey."""

    def lacks_tokens(self, job: InferenceJob) -> bool:
        """Whether the job's engine takes token ids that its ingress process could not make."""

    async def tokenized(self, job: InferenceJob) -> InferenceJob:
        """The job with them. Raises GatewayError."""

    def trace(self, job: InferenceJob, headers: Mapping[bytes, bytes]) -> None:
        """Give the job a trace that continues the one of these headers."""

    def serve_http(self, transport: asyncio.Transport, unread: bytes, peer: str) -> None:
        """Serve a client's HTTP connection that an ingress process forwards."""

    def count_requests(self, path: str, status: int, number: int) -> None:
        """Count HTTP requests that an ingress process has answered."""
