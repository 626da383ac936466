"""What jobs are charged, and when: uncached prompt tokens when they are sent, put right when the worker has counted
them; output tokens as they are produced, or at the end."""

from typing import Final

from inferry.domain.plans import Ended
from inferry.scheduling.queues.queued_job import QueuedJob

_MAX_TENANTS: Final = 10_000


def prefilled(entry: QueuedJob, tokens: int) -> None:
    """The prompt tokens that were really computed, where the worker says so."""
    if tokens != entry.charged_tokens:
        entry.run.charge(tokens - entry.charged_tokens)
        entry.charged_tokens = tokens


def produced(entry: QueuedJob, tokens: int) -> None:
    entry.produced += tokens
    entry.run.charge(tokens)


def ended(entry: QueuedJob, end: Ended) -> None:
    if end.prompt_tokens is not None:
        prefilled(entry, max(0, end.prompt_tokens - (end.cached_tokens or 0)))
    if end.output_tokens is not None and end.output_tokens != entry.produced:
        produced(entry, end.output_tokens - entry.produced)


class ServiceHistory:
    """What tenants were served in accounts that are closed, up to ten thousand of them."""

    __slots__ = ("served",)

    def __init__(self) -> None:
        self.served: dict[str, int] = {}

    def record_service(self, tenant: str, tokens: int) -> None:
        tokens += self.served.pop(tenant, 0)
        if len(self.served) >= _MAX_TENANTS:
            del self.served[next(iter(self.served))]
        self.served[tenant] = tokens
