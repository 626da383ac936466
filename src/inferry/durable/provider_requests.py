"""Which items of a batch a provider executes, and how they are written for it. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from inferry.domain.callers import Caller
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.provider_batches import AssignedItem, BatchProvider, ProviderRequest, ProviderResult
from inferry.domain.storage import Batch, BatchItem, item_id, try_id
from inferry.domain.tenants import Limits

MAX_ITEMS = 5000
MAX_BYTES = 32 * 1024 * 1024
"""Largest provider batch: its requests are in memory while they are sent."""

_OWN_FIELDS = ("stream", "stream_options", "service_tier")
"""Fields about how the gateway serves a call."""
_TEMPORARY = frozenset({408, 409, 429})


class _Body(msgspec.Struct):
    model: str = ""


_body_decoder = msgspec.json.Decoder(_Body)


def provider_for(batch: Batch, item: BatchItem, caller: Caller, providers: Sequence[BatchProvider]) -> str | None:
    """The worker whose provider executes the item; None: the gateway does."""
    try:
        model = _body_decoder.decode(item.body).model
    except msgspec.MsgspecError:
        return None
    if not caller.allows_model(model):
        return None
    for provider in providers:
        if model in provider.models and batch.endpoint in provider.paths and provider.pool == caller.pool:
            return provider.worker
    return None


def has_ceilings(caller: Caller) -> bool:
    """Whether a budget limits the caller. Leases are not held for as long as a provider's batch may take."""
    limits = [caller.tenant.limits] + ([] if caller.key is None else [caller.key.limits])
    return any(getattr(one, name) is not None for one in limits for name in _CEILINGS)


_CEILINGS = tuple(name for name in Limits.__struct_fields__ if name.endswith("_ceiling"))


def requests_of(marker: str, items: Sequence[AssignedItem]) -> list[ProviderRequest]:
    return [ProviderRequest(custom_id(marker, item.number), _body(item.body)) for item in items]


def custom_id(marker: str, number: int) -> str:
    return f"{marker}-{number}"


def number_of(custom_id: str) -> int:
    """The number of the item with this custom id; -1 for an id that the gateway has not given."""
    number = custom_id.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else -1


def is_temporary(result: ProviderResult) -> bool:
    """Whether another try may succeed: the gateway then executes the item itself."""
    return result.status in _TEMPORARY or result.status >= 500


def entry_of(
    batch: Batch, item: AssignedItem, result: ProviderResult, worker: str, model: str, *, cost: int | None, wall: float
) -> LedgerEntry:
    """The ledger's row of an item. Its key is that of the item's try, so that a repeated one is not charged twice."""
    is_good = 200 <= result.status < 300
    return LedgerEntry(
        job_id=try_id(item_id(batch.id, item.number), item.tries),
        attempt=1,
        tenant=batch.tenant,
        run_id=batch.id,
        step_id=f"item-{item.number}",
        model=model,
        lane="P2",
        outcome=Outcome.DONE if is_good else Outcome.FAILED,
        ended_at=wall,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        output_tokens=result.output_tokens,
        total_ms=1000 * (wall - batch.created_at),
        worker=worker,
        error_code=None if is_good else "provider_error",
        request_id=result.request_id,
        key_id=batch.key_id,
        cost_nanos=cost,
    )


def model_of(body: bytes) -> str:
    return _body_decoder.decode(body).model


def _body(body: bytes) -> bytes:
    decoded: Mapping[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({name: raw for name, raw in decoded.items() if name not in _OWN_FIELDS})
