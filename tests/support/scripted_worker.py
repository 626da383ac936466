"""A worker that does what a script says: the fake that passes the same contract suite as the real ones."""

import asyncio
from collections.abc import Iterable, Sequence

from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import ClientClosed, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.domain.workers import Capacity, Load, Phase, WorkerView


class ScriptedWorker:
    """Says `words` for every job, one per turn of the event loop, or whatever the test sets it to do.

    `gate` holds every word back until it is set, `pause_s` passes after each; `dies_after` breaks off with an exception
    after so many words.
    Its token ids are the numbers of its words, so that it can go on from them.
    """

    def __init__(
        self,
        name: str = "scripted",
        *,
        models: Sequence[str] = ("m",),
        words: Sequence[str] = ("one", " two", " three"),
        capacity: Capacity | None = None,
        clock: Clock | None = None,
        context_tokens: int | None = 4096,
        pads: bool = False,
        can_resume: bool = False,
        pause_s: float = 0.0,
        precision: str | None = None,
    ) -> None:
        self._name = name
        self.pause_s = pause_s
        self._models = tuple(models)
        self.words = tuple(words)
        self.capacity = capacity or Capacity(sequences=8)
        self.phase = Phase.STARTING
        self.gate = asyncio.Event()
        self.gate.set()
        self.dies_after: int | None = None
        self.returns_early = False
        self.plans: list[BatchPlan] = []
        self.cancelled: list[str] = []
        self._clock = clock or SystemClock()
        self._context_tokens = context_tokens
        self._pads = pads
        self._can_resume = can_resume
        self._precision = precision
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def running(self) -> int:
        return len(self._running)

    def cards(self) -> Sequence[ModelCard]:
        return [
            ModelCard(name=model, context_tokens=self._context_tokens, can_resume=self._can_resume)
            for model in self._models
        ]

    def view(self) -> WorkerView:
        return WorkerView(
            worker=self._name,
            models=frozenset(self._models),
            phase=self.phase,
            capacity=self.capacity,
            pads=self._pads,
            precision=self._precision,
            load=Load(running=len(self._running)),
            observed_at=self._clock.now(),
        )

    async def start(self) -> None:
        self.phase = Phase.READY

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        if plan.jobs[0].step_id != "probe":
            self.plans.append(plan)
        tasks = []
        for job in plan.jobs:
            task = asyncio.get_running_loop().create_task(self._generate(job, emit))
            self._running[job.job_id] = task
            tasks.append(task)
        await asyncio.wait(tasks)
        for job, task in zip(plan.jobs, tasks, strict=True):
            self._running.pop(job.job_id, None)
            if task.cancelled():  # before its first step
                emit(Failed(job.job_id, ClientClosed("cancelled")))
            else:
                task.result()

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        found = {job_id: task for job_id in job_ids if (task := self._running.get(job_id)) is not None}
        for task in found.values():
            task.cancel()
        if found:
            await asyncio.wait(found.values())
        self.cancelled.extend(found)
        return frozenset(found)

    async def close(self) -> None:
        await self.cancel(list(self._running))
        self.phase = Phase.DOWN

    async def _generate(self, job: InferenceJob, emit: Emit) -> None:
        is_probe = job.step_id == "probe"
        before = len(job.resume_point.output_ids) if job.resume_point is not None else 0
        written_words = 0

        def resume_point() -> ResumePoint | None:
            known = self._can_resume and job.resume is ResumeMode.CONTINUE
            return ResumePoint((1, 2, 3), tuple(range(before + written_words))) if known else None

        try:
            if self.returns_early and not is_probe:
                return
            for word in self.words[before : job.token_budget]:
                if not is_probe:
                    await self.gate.wait()
                if written_words == self.dies_after:
                    raise WorkerLost("the script said so")
                emit(Delta(job.job_id, job.run_id, job.step_id, written_words, word, (before + written_words,), 1))
                written_words += 1
                await asyncio.sleep(0 if is_probe else self.pause_s)
            length = len(self.words) > job.token_budget
            finish = FinishReason.LENGTH if length else FinishReason.STOP
            emit(Done(job.job_id, finish, Usage(job.footprint.prompt.expected, 0, written_words, 0.001)))
        except asyncio.CancelledError:
            emit(Failed(job.job_id, ClientClosed("cancelled"), Usage(output_tokens=written_words), resume_point()))
        except WorkerLost as error:
            emit(Failed(job.job_id, error, Usage(output_tokens=written_words), resume_point()))
        finally:
            self._running.pop(job.job_id, None)
