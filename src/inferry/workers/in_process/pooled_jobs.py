"""The pooled jobs that an engine process holds: one sequence for each input, one answer for each job.

A job is in the table from the moment it is sent until its end is emitted, which happens exactly once, in `_end`.
"""

from collections.abc import Callable
from itertools import count

from inferry.domain.errors import ClientClosed, ContextLengthExceeded, GatewayError, UpstreamRefused, WorkerLost
from inferry.domain.jobs import InferenceJob, PooledInputs
from inferry.domain.pooling import cosine, encode_answer, encode_result
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.engine.messages import Aborted, Account, Rejected, Request, StepDone
from inferry.workers.plan_completion import PlanCompletion


class PooledJob:
    """`open_keys` are its sequences in the engine, by key, with the index of their input."""

    __slots__ = ("completion", "emit", "error", "gpu_seconds", "job", "open_keys", "prompt_tokens", "results")

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> None:
        self.job = job
        self.emit = emit
        self.completion = completion
        self.open_keys: dict[int, int] = {}
        self.results: dict[int, bytes] = {}
        self.prompt_tokens = 0
        self.gpu_seconds = 0.0
        self.error: GatewayError | None = None

    def count(self, account: Account) -> None:
        self.prompt_tokens += account.prompt_tokens
        self.gpu_seconds += account.gpu_seconds

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, 0, 0, self.gpu_seconds)

    def answer(self, inputs: PooledInputs) -> bytes:
        results = [self.results[index] for index in range(len(self.results))]
        if inputs.pairs is not None:
            return encode_answer([cosine(results[a], results[b]) for a, b in inputs.pairs], self.prompt_tokens)
        if self.job.payload.api == "score":
            return encode_answer([memoryview(one).cast("f")[0] for one in results], self.prompt_tokens)
        return encode_answer([encode_result(one, inputs.dimensions) for one in results], self.prompt_tokens)


class PooledJobs:
    """`keys` gives the keys of sequences; `abort` aborts keys in the engine."""

    def __init__(self, keys: "count[int]", abort: Callable[[list[int]], object]) -> None:
        self._keys = keys
        self._abort = abort
        self._by_key: dict[int, PooledJob] = {}
        self._by_job: dict[str, PooledJob] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._by_job)

    def add(
        self, job: InferenceJob, emit: Emit, completion: PlanCompletion, batch: int = 0, adapter: int = 0
    ) -> list[Request]:
        """The engine's requests for a job whose inputs are token ids, with the numbers of its batch key and adapter."""
        inputs = job.payload.pooled
        assert inputs is not None
        assert inputs.ids is not None
        live = self._by_job[job.job_id] = PooledJob(job, emit, completion)
        requests: list[Request] = []
        for index, ids in enumerate(inputs.ids):
            key = next(self._keys)
            live.open_keys[key] = index
            self._by_key[key] = live
            sampling = job.payload.sampling
            requests.append(Request(key, list(ids), sampling, job.lane, pooled=True, batch=batch, adapter=adapter))
        return requests

    def keys_of(self, job_id: str) -> list[int]:
        """The sequences of a job; empty where there is no such job."""
        live = self._by_job.get(job_id)
        return [] if live is None else list(live.open_keys)

    def cancelled(self, job_id: str) -> None:
        """The sequences of the job are being aborted, because its client or run has ended it."""
        self._by_job[job_id].error = ClientClosed("cancelled")

    def drop_plan(self, completion: PlanCompletion) -> None:
        """Abort the jobs of a plan without emitting their ends: the plan was cancelled."""
        keys: list[int] = []
        for live in [live for live in self._by_job.values() if live.completion is completion]:
            keys += live.open_keys
            self._drop(live)
        if keys:
            self._abort(keys)

    def fail_all(self, reason: str) -> None:
        """End every job: the engine is lost."""
        for live in list(self._by_job.values()):
            self._end(live, Failed(live.job.job_id, live.error or WorkerLost(reason), live.usage()))

    def on_message(self, message: StepDone | Aborted | Rejected) -> None:
        match message:
            case StepDone(_, ends, _, pooled) if pooled:
                results = dict(pooled)
                for end in ends:
                    key = end.account.key
                    live = self._by_key.get(key)
                    if live is not None:
                        live.results[live.open_keys[key]] = results[key]
                        self._close(live, key, end.account)
            case Aborted(_, freed):
                for account in freed:
                    live = self._by_key.get(account.key)
                    if live is not None:
                        self._close(live, account.key, account)
            case Rejected(key, too_long, text):
                live = self._by_key.get(key)
                if live is not None:
                    text = f"input {live.open_keys[key]}: {text}"
                    live.error = ContextLengthExceeded(text) if too_long else UpstreamRefused(text)
                    self._close(live, key, None)
                    if live.open_keys:
                        self._abort(list(live.open_keys))

    def _close(self, live: PooledJob, key: int, account: Account | None) -> None:
        """A sequence has left the engine; with the last one the job ends."""
        del live.open_keys[key], self._by_key[key]
        if account is not None:
            live.count(account)
        if live.open_keys:
            return
        job, inputs = live.job, live.job.payload.pooled
        assert inputs is not None
        if live.error is not None:
            self._end(live, Failed(job.job_id, live.error, live.usage()))
            return
        delta = Delta(job.job_id, job.run_id, job.step_id, 0, raw=live.answer(inputs), is_last=True)
        self._drop(live)
        _emit(live, delta)
        self._finish(live, Done(job.job_id, FinishReason.STOP, live.usage()))

    def _end(self, live: PooledJob, end: Failed) -> None:
        self._drop(live)
        self._finish(live, end)

    def _finish(self, live: PooledJob, end: Done | Failed) -> None:
        _emit(live, end)
        live.completion.job_ended()

    def _drop(self, live: PooledJob) -> None:
        del self._by_job[live.job.job_id]
        for key in live.open_keys:
            del self._by_key[key]
        live.open_keys.clear()


def _emit(live: PooledJob, item: Delta | Done | Failed) -> None:
    try:
        live.emit(item)
    except Exception as error:
        # A receiver that raises fails its own plan, not the other jobs of the step.
        live.completion.fail(error)
