"""Results of ledger queries.

Tokens and GPU-seconds are sums over all attempts; cached tokens are part of the prompt tokens. Jobs count by the
outcome of their last attempt. `gpu_seconds` is the sum of the known values, None where none is known. Times are seconds
since the Unix epoch.
"""

from msgspec import Struct

from inferry.domain.runs import RunSummary

__all__ = ["RunSummary", "TenantSummary"]


class TenantSummary(Struct, frozen=True, kw_only=True):
    """One tenant. `tokens_per_gpu_second` counts computed tokens (prompt less cached, and output) of the attempts with
    known GPU time."""

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
    cost_nanos: int | None
    queue_ms_mean: float | None
    batch_size_mean: float | None
