"""Work of the queue that pull-workers run: handed out, and its results stored.

Belongs to one event loop. A pull-worker reads ids from the queue; the content of work is known to the gateways alone.
Identity, lane and price of a result come from the database and the configuration, not from the pull-worker.
"""

from collections.abc import Callable, Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, ModelNotAllowed
from inferry.domain.ledger import GpuTimeRow, LedgerEntry
from inferry.durable.execute import CallAnswer
from inferry.durable.provider_requests import has_ceilings
from inferry.durable.stored_work import StoredWork, model_in
from inferry.durable.work_source import DatabaseWork


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
    tries: int


class WorkReport(Struct, kw_only=True, tag_field="do", tag="finish"):
    """The end of work: its answer, None where its deadline has passed; and what the ledger gets."""

    id: str
    answer: CallAnswer | None = None
    entries: tuple[LedgerEntry, ...] = ()
    gpu_time: tuple[GpuTimeRow, ...] = ()


class LoadedWork(Struct):
    work: list[StoredWork]


class EndedWork(Struct):
    ended: list[str]


Message = WorkRequest | OpenRequest | TryReport | WorkReport
Reply = LoadedWork | EndedWork


class PulledWork:
    """`caller_of` raises GatewayError for a key that is no longer valid. `cost_of`: cost of an entry in billionths.
    `record` accepts rows of the ledger.
    """

    def __init__(
        self,
        source: DatabaseWork,
        models: Collection[str],
        *,
        caller_of: Callable[[str, str | None], Caller],
        cost_of: Callable[[LedgerEntry], int | None],
        record: Callable[[LedgerEntry | GpuTimeRow], None],
    ) -> None:
        self._source = source
        self._models = frozenset(models)
        self._caller_of = caller_of
        self._cost_of = cost_of
        self._record = record

    async def answer(self, message: Message) -> Reply:
        """Do what a pull-worker asks. Raises ModelNotAllowed."""
        match message:
            case WorkRequest():
                return LoadedWork(await self._load(message))
            case OpenRequest():
                return EndedWork(sorted(await self._source.ended(message.ids)))
            case TryReport():
                for work in await self._known([message.id]):
                    await self._source.begin_try(work, message.tries)
            case WorkReport():
                await self._finish(message)
        return EndedWork([])

    async def _load(self, request: WorkRequest) -> list[StoredWork]:
        if not self._models.issuperset(request.models):
            raise ModelNotAllowed(f"pull-workers serve {', '.join(sorted(self._models))} (cluster.pull_models)")
        allowed: list[StoredWork] = []
        for work in await self._known(request.ids):
            if model_in(work.body) not in request.models:
                continue
            if (error := self._refusal(work)) is None:
                allowed.append(work)
            else:
                await self._source.reject(work, error.status, error.code, error.message)
        return allowed

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
        for row in report.gpu_time:
            self._record(row)
        for work in await self._known([report.id]):
            for entry in report.entries:
                if entry.job_id.startswith(f"{work.id}-"):
                    self._record(self._charged(work, entry))
            if report.answer is None:
                await self._source.expire(work)
            else:
                await self._source.finish(work, report.answer)

    async def _known(self, ids: Sequence[str]) -> list[StoredWork]:
        """Work that has not ended, of models that pull-workers serve."""
        found = (await self._source.load(ids)).values() if ids else ()
        return [work for work in found if model_in(work.body) in self._models]

    def _charged(self, work: StoredWork, entry: LedgerEntry) -> LedgerEntry:
        return replace(
            entry,
            tenant=work.tenant,
            key_id=work.key_id,
            run_id=work.run_id,
            step_id=work.step_id,
            parent_run=work.headers.get("x-inferry-parent-run-id"),
            lane=work.lane,
            model=model_in(work.body),
            cost_nanos=self._cost_of(entry),
        )
