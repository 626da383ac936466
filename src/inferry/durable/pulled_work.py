"""Work of the queue that pull-workers run: handed out, and its results stored.

Belongs to one event loop. A pull-worker reads ids from the queue; the content of work is known to the gateways alone.
Identity, lane and price of a result come from the database and the configuration, not from the pull-worker.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, InvalidRequest, ModelNotAllowed
from inferry.domain.ledger import GpuTimeRow, LedgerEntry
from inferry.durable.execute import CallAnswer
from inferry.durable.provider_requests import has_ceilings
from inferry.durable.stored_work import StoredWork, model_in
from inferry.durable.work_source import DatabaseWork

LOADED_BYTES = 32 * 1024 * 1024
"""Bodies of one answer, unless it has a single one. A pull-worker asks again for the rest."""
LOADED_AT_ONCE = 16
"""Ids that are read from the database together: their bodies are in memory before they are counted."""
MAX_BODY_BYTES = 128 * 1024 * 1024
"""Work with a larger body is given up. Pull-workers take answers of twice this size."""
MAX_PROBLEM_CHARS = 200
MAX_NUMBER = 10**12
"""Largest count, duration or number of GPU-seconds that is believed."""


class WorkRequest(Struct, kw_only=True, tag_field="do", tag="load"):
    """Asks for work. `models` are those that the pull-worker serves."""

    models: tuple[str, ...]
    ids: tuple[str, ...] = ()


class OpenRequest(Struct, kw_only=True, tag_field="do", tag="ended"):
    """Asks which of the ids have ended."""

    ids: tuple[str, ...]


class TryReport(Struct, kw_only=True, tag_field="do", tag="try"):
    """The next try of work begins."""

    id: str
    tries: Annotated[int, Meta(ge=0, le=10_000)]


class WorkReport(Struct, kw_only=True, tag_field="do", tag="finish"):
    """The end of work: its answer, or the problem for which it is given up, or neither where its deadline has passed;
    and what the ledger gets.
    """

    id: str
    answer: CallAnswer | None = None
    problem: str | None = None
    entries: tuple[LedgerEntry, ...] = ()
    gpu_time: tuple[GpuTimeRow, ...] = ()


class LoadedWork(Struct):
    """`left`: ids to ask for again. `max_bytes`: the largest message that the gateway accepts."""

    work: list[StoredWork]
    left: list[str] = []
    max_bytes: int | None = None


class EndedWork(Struct):
    ended: list[str]


RowT = TypeVar("RowT", LedgerEntry, GpuTimeRow)
Message = WorkRequest | OpenRequest | TryReport | WorkReport
Reply = LoadedWork | EndedWork


class PulledWork:
    """`caller_of` raises GatewayError for a key that is no longer valid. `cost_of`: cost of an entry in billionths.
    `record` accepts rows of the ledger. `max_bytes`: the largest message that the gateway accepts.
    """

    def __init__(
        self,
        source: DatabaseWork,
        models: Collection[str],
        *,
        caller_of: Callable[[str, str | None], Caller],
        cost_of: Callable[[LedgerEntry], int | None],
        record: Callable[[LedgerEntry | GpuTimeRow], None],
        max_bytes: int | None = None,
        loaded_bytes: int = LOADED_BYTES,
        max_body_bytes: int = MAX_BODY_BYTES,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._models = frozenset(models)
        self._caller_of = caller_of
        self._cost_of = cost_of
        self._record = record
        self._max_bytes = max_bytes
        self._loaded_bytes = loaded_bytes
        self._max_body_bytes = max_body_bytes
        self._wall = wall

    async def answer(self, message: Message) -> Reply:
        """Do what a pull-worker asks. Raises ModelNotAllowed, and InvalidRequest for an answer that no call has."""
        match message:
            case WorkRequest():
                return await self._load(message)
            case OpenRequest():
                return EndedWork(sorted(await self._source.ended(message.ids)))
            case TryReport():
                for work in await self._known([message.id]):
                    await self._source.begin_try(work, message.tries)
            case WorkReport():
                await self._finish(message)
        return EndedWork([])

    async def _load(self, request: WorkRequest) -> LoadedWork:
        if not self._models.issuperset(request.models):
            raise ModelNotAllowed(f"pull-workers serve {', '.join(sorted(self._models))} (cluster.pull_models)")
        loaded, size = LoadedWork([], max_bytes=self._max_bytes), 0
        for start in range(0, len(request.ids), LOADED_AT_ONCE):
            if size >= self._loaded_bytes:
                loaded.left += request.ids[start:]
                break
            for work in await self._known(request.ids[start : start + LOADED_AT_ONCE]):
                if model_in(work.body) not in request.models:
                    continue
                size += len(work.body)
                if loaded.work and size > self._loaded_bytes:
                    loaded.left.append(work.id)
                elif await self._is_allowed(work):
                    loaded.work.append(work)
        return loaded

    async def _is_allowed(self, work: StoredWork) -> bool:
        """Whether pull-workers may run the work; it has ended where they may not."""
        if len(work.body) > self._max_body_bytes:
            problem = f"its body has {len(work.body)} bytes; pull-workers take {self._max_body_bytes}"
            await self._source.abandon(work, problem, problem)
        elif (error := self._refusal(work)) is not None:
            await self._source.reject(work, error.status, error.code, error.message)
        else:
            return True
        return False

    def _refusal(self, work: StoredWork) -> GatewayError | None:
        """Why pull-workers may not run the work."""
        try:
            caller = self._caller_of(work.tenant, work.key_id)
        except GatewayError as error:
            return error
        if not caller.allows_model(model_in(work.body)):
            return ModelNotAllowed("the tenant or its key may not use this model")
        if caller.pool is not None:
            return ModelNotAllowed("the tenant has workers of its own, and pull-workers serve all tenants")
        if has_ceilings(caller):
            # A pull-worker has no budget leases: what it spends is known when it is spent.
            return ModelNotAllowed("the tenant or its key has a budget, and pull-workers cannot keep to it")
        return None

    async def _finish(self, report: WorkReport) -> None:
        answer = report.answer
        if answer is not None and not 100 <= answer.status <= 599:
            raise InvalidRequest("the status of an answer must be between 100 and 599")
        texts = (report.problem,) if answer is None else (report.problem, answer.code, answer.request_id)
        if any(text is not None and "\0" in text for text in texts):
            raise InvalidRequest("a text has a character that cannot be stored")
        for row in report.gpu_time:
            self._record(self._believed(row))
        for work in await self._known([report.id]):
            for entry in report.entries:
                if entry.job_id.startswith(f"{work.id}-"):
                    self._record(self._charged(work, entry))
            if report.problem is not None:
                problem = report.problem[:MAX_PROBLEM_CHARS]
                await self._source.abandon(work, problem, problem)
            elif report.answer is None:
                await self._source.expire(work)
            else:
                await self._source.finish(work, report.answer)

    async def _known(self, ids: Sequence[str]) -> list[StoredWork]:
        """Work that has not ended, of models that pull-workers serve."""
        found = (await self._source.load(ids)).values() if ids else ()
        return [work for work in found if model_in(work.body) in self._models]

    def _believed(self, row: RowT) -> RowT:
        """The row with numbers that no gateway would write replaced: negative ones, huge ones, an end in the future."""
        changes: dict[str, Any] = {}
        for name, value in asdict(row).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value <= MAX_NUMBER:
                changes[name] = type(value)(MAX_NUMBER if value > 0 and math.isfinite(value) else 0)
        changes["ended_at"] = min(changes.get("ended_at", row.ended_at), self._wall())
        return replace(row, **changes)

    def _charged(self, work: StoredWork, entry: LedgerEntry) -> LedgerEntry:
        charged = replace(
            self._believed(entry),
            tenant=work.tenant,
            key_id=work.key_id,
            run_id=work.run_id,
            step_id=work.step_id,
            parent_run=work.headers.get("x-inferry-parent-run-id"),
            lane=work.lane,
            model=model_in(work.body),
        )
        return replace(charged, cost_nanos=self._cost_of(charged))
