"""A worker that measures its steps, seen as the gateway sees an HTTP server: tokens, ends and counters."""

from collections.abc import Iterable, Sequence

from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Delta, Done, Failed, Item, Usage
from inferry.domain.values import replace
from inferry.domain.workers import EngineCounts, WorkerView
from inferry.workers.in_process.engine_worker import EngineWorker


class OutsideView:
    """Passes on everything except measured GPU time, which it keeps: `measured` is seconds by job."""

    def __init__(self, inner: EngineWorker) -> None:
        self._inner = inner
        self.measured: dict[str, float] = {}
        self._prompt_tokens = self._output_tokens = 0
        self._begun: set[str] = set()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def busy_s(self) -> float:
        """Seconds of all steps."""
        return self._inner.view().busy_s or 0.0

    async def start(self) -> None:
        await self._inner.start()

    def view(self) -> WorkerView:
        view, stats = self._inner.view(), self._inner.stats
        steps = 0 if stats is None else stats.steps
        counts = EngineCounts(steps, self._prompt_tokens, self._output_tokens)
        return replace(view, busy_s=None, counts=counts, counted_at=view.observed_at)

    def cards(self) -> Sequence[ModelCard]:
        return self._inner.cards()

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        prompts = {job.job_id: job.footprint.prefill_tokens for job in plan.jobs}

        def pass_on(item: Item) -> None:
            if isinstance(item, Delta):
                self._output_tokens += item.tokens
                if item.tokens and item.job_id not in self._begun:
                    self._begun.add(item.job_id)
                    self._prompt_tokens += prompts[item.job_id]
                emit(item)
                return
            assert isinstance(item, Done | Failed)
            usage = item.usage
            self.measured[item.job_id] = usage.gpu_seconds or 0.0
            unmeasured = Usage(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
            emit(replace(item, usage=unmeasured))

        await self._inner.run(plan, pass_on)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        return await self._inner.cancel(job_ids)

    async def close(self) -> None:
        await self._inner.close()
