"""The quota gate of a process whose calls are admitted by another one."""

from collections.abc import Sequence
from typing import Final

from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.reports import RateLimitStatus
from inferry.domain.callers import Caller
from inferry.domain.jobs import InferenceJob

MAX_CALLERS: Final = 10_000
"""Callers whose rate limits are remembered."""


class OpenGate(QuotaGate):
    """Admits every job and counts nothing: the owner of the workers enforces all limits."""

    def __init__(self) -> None:
        super().__init__({})
        self._permit = self._unlimited_default_permit
        self._status: dict[tuple[str, str | None], RateLimitStatus] = {}

    def admit(self, job: InferenceJob, caller: Caller, lineage: Sequence[str], now: float, wall: float) -> Permit:
        return self._permit

    def rate_limit_status(self, caller: Caller, now: float) -> RateLimitStatus | None:
        """The state that the owner reported with the caller's latest job."""
        return self._status.get((caller.tenant.name, None if caller.key is None else caller.key.key_id))

    def reported(self, tenant: str, key_id: str | None, status: RateLimitStatus) -> None:
        """The owner has reported the state of a caller's rate limits."""
        if len(self._status) >= MAX_CALLERS:
            self._status.clear()
        self._status[tenant, key_id] = status
