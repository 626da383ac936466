"""A Python function in a process of its own as a worker.

One event loop owns all state and is the only caller. `EngineSupervisor` owns the process, `FunctionJobs` the jobs whose
inputs the process holds. A call of the function is a pass that later jobs cannot join, so the worker pads: the
scheduler collects jobs while a call runs.
"""

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import GatewayError, InvalidRequest, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.routes import Task
from inferry.domain.streams import Failed
from inferry.domain.workers import Capacity, WorkerView
from inferry.engine.messages import (
    Abort,
    Aborted,
    AdapterChanged,
    AddInputs,
    FunctionSetup,
    Rejected,
    Returned,
    StepDone,
)
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram
from inferry.workers.in_process.engine_supervisor import EngineSupervisor
from inferry.workers.in_process.function_jobs import FunctionJobs
from inferry.workers.plan_completion import PlanCompletion


class FunctionSettings(Struct, frozen=True, kw_only=True):
    """`function` is `package.module:name`, found in `directory` too. `call_timeout_s`: the process of a call that takes
    longer is killed and started again.
    """

    function: str
    directory: Path
    model: str
    task: Task
    max_batch: int = 64
    call_timeout_s: float = 60.0
    default_output_tokens: int = 512
    group: str = "default"
    pool: str | None = None
    precision: str | None = None
    gpus: int = 0


class PythonFunctionWorker:
    """`domain.ports.Worker` over a function of a list of inputs. Answers come whole; no job can be resumed."""

    def __init__(
        self,
        name: str,
        settings: FunctionSettings,
        clock: Clock | None = None,
        *,
        restart_backoff_s: float = 0.5,
        restart_backoff_max_s: float = 30.0,
    ) -> None:
        self._name = name
        self._settings = settings
        clock = clock or SystemClock()
        self._created = int(clock.wall())
        self._jobs = FunctionJobs(measures_gpu=settings.gpus > 0)
        self._aborts: dict[int, asyncio.Future[None]] = {}
        self._abort_calls = 0
        self._busy_s = 0.0
        self._process = EngineSupervisor(
            name,
            partial(EngineLink.open, _program(settings)),
            clock,
            on_message=self._on_message,
            on_ready=lambda: None,
            on_lost=self._fail_all,
            has_work=lambda: self._jobs.is_busy,
            restart_backoff_s=restart_backoff_s,
            restart_backoff_max_s=restart_backoff_max_s,
            stall_timeout_s=settings.call_timeout_s,
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int | None:
        """The process id of the function's process that runs now."""
        return self._process.pid

    async def start(self) -> None:
        await self._process.start()

    async def close(self) -> None:
        await self._process.close()
        self._fail_all("the worker was closed")

    def view(self) -> WorkerView:
        settings = self._settings
        return WorkerView(
            worker=self._name,
            models=frozenset({settings.model}),
            phase=self._process.phase,
            capacity=Capacity(sequences=settings.max_batch),
            observed_at=self._process.observed_at,
            group=settings.group,
            isolation=settings.pool,
            precision=settings.precision,
            pads=True,
            gpus=settings.gpus,
            busy_s=self._busy_s,
            last_activity_at=self._process.last_message_at,
        )

    def cards(self) -> Sequence[ModelCard]:
        settings = self._settings
        output_tokens = settings.default_output_tokens if settings.task is Task.GENERATE else None
        return [
            ModelCard(
                name=settings.model,
                default_output_tokens=output_tokens,
                features=frozenset({"dimensions"}),
                tasks=frozenset({settings.task}),
                created=self._created,
            )
        ]

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        completion = PlanCompletion(len(plan.jobs))
        inputs = []
        for job in plan.jobs:
            refusal = self._refusal(job)
            if refusal is None:
                inputs += self._jobs.add(job, emit, completion)
                continue
            emit(Failed(job.job_id, refusal))
            completion.job_ended()
        try:
            if inputs:
                self._process.restart_stall_timer()
                self._process.send(AddInputs(inputs))
            await completion.finished
        except BaseException:
            # Cancelled: the ends of these jobs are not awaited any more.
            keys = self._jobs.drop_plan(completion)
            if keys:
                self._abort(keys)
            raise

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Remove these jobs. A call of the function that has begun cannot be stopped; it is confirmed at its end."""
        keys_of = {job_id: keys for job_id in job_ids if (keys := self._jobs.keys_of(job_id))}
        for job_id in keys_of:
            self._jobs.cancelled(job_id)
        keys = [key for one in keys_of.values() for key in one]
        if keys:
            await self._abort(keys)
        return frozenset(keys_of)

    def _abort(self, keys: list[int]) -> "asyncio.Future[None]":
        """Done when the process holds none of these inputs, or is lost."""
        self._abort_calls += 1
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._process.send(Abort(self._abort_calls, keys)):
            self._aborts[self._abort_calls] = confirmed
        else:
            confirmed.set_result(None)
        return confirmed

    def _on_message(self, message: StepDone | Returned | Aborted | Rejected | AdapterChanged) -> None:
        assert isinstance(message, Returned | Aborted), "the process of a function sends nothing else"
        self._jobs.on_message(message)
        if isinstance(message, Returned):
            self._busy_s += message.seconds
        elif (confirmed := self._aborts.pop(message.call, None)) is not None and not confirmed.done():
            confirmed.set_result(None)

    def _fail_all(self, reason: str) -> None:
        self._jobs.fail_all(reason)
        for confirmed in self._aborts.values():
            if not confirmed.done():
                confirmed.set_result(None)
        self._aborts.clear()

    def _refusal(self, job: InferenceJob) -> GatewayError | None:
        if not self._process.accepts_jobs:
            return WorkerLost(f"the function of worker {self._name} is not ready")
        if self._jobs.keys_of(job.job_id):
            return InvalidRequest("the job is already running on this worker")
        return None


def _program(settings: FunctionSettings) -> EngineProgram:
    """The function's process with this interpreter and environment."""
    package_root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    return EngineProgram(
        command=(sys.executable, "-m", "inferry.workers.in_process.function_process"),
        environment={**os.environ, "PYTHONPATH": path},
        setup=FunctionSetup(
            settings.function, settings.task.value, settings.max_batch, str(settings.directory.absolute())
        ),
    )
