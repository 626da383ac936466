"""What people ask the ledger: values that the read side answers with.

Tokens and GPU-seconds are those of all attempts, since all were paid for; the cached tokens are part of the prompt's.
Jobs count by how their last attempt ended. `gpu_seconds` is the sum of what is known, None where nothing is. Times are
seconds since the Unix epoch.
"""

from msgspec import Struct

from inferry.domain.runs import RunSummary

__all__ = ["RunSummary", "TenantSummary"]


class TenantSummary(Struct, frozen=True, kw_only=True):
    """One tenant. `tokens_per_gpu_second` counts what a GPU computed and was charged for: prompt less cached, and
    output, of the attempts whose GPU time is known."""

    tenant: str
    runs: int
    jobs: int
    attempts: int
    done: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_seconds: float | None
    tokens_per_gpu_second: float | None
    queue_ms_mean: float | None
    batch_size_mean: float | None
