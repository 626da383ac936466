"""Jobs with several inputs, each of which a process holds under a key: pooled jobs of the engine, calls of a function.

A job is in the table from the moment its inputs are sent until its end is emitted, which happens exactly once, in
`_end`.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from inferry.domain.errors import ClientClosed, GatewayError, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.pooling import PooledResult, classify, encode_answer, encode_result
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed
from inferry.workers.plan_completion import PlanCompletion


class InputJob:
    """`open_keys` are its inputs in the process, by key, with their index. `seconds` were spent on them."""

    __slots__ = ("completion", "emit", "error", "job", "open_keys", "prompt_tokens", "results", "seconds")

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> None:
        self.job = job
        self.emit = emit
        self.completion = completion
        self.open_keys: dict[int, int] = {}
        self.results: dict[int, bytes] = {}
        self.prompt_tokens = 0
        self.seconds = 0.0
        self.error: GatewayError | None = None

    def pooled_answer(self, prompt_tokens: int, labels: Sequence[str] = ()) -> bytes:
        """The results of all inputs. `labels`: those of the model's head."""
        inputs = self.job.payload.pooled
        assert inputs is not None
        stored = [self.results[index] for index in range(len(self.results))]
        results: list[PooledResult]
        match self.job.payload.api:
            case "score":
                results = [memoryview(one).cast("f")[0] for one in stored]
            case "classify":
                results = [classify(one, labels) for one in stored]
            case _:
                results = [encode_result(one, inputs.dimensions) for one in stored]
        return encode_answer(results, prompt_tokens)


class InputJobs:
    """The jobs that one process holds. `keys` gives the keys of inputs."""

    def __init__(self, keys: "count[int]") -> None:
        self._keys = keys
        self._by_key: dict[int, InputJob] = {}
        self._by_job: dict[str, InputJob] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._by_job)

    def keys_of(self, job_id: str) -> list[int]:
        """The inputs of a job; empty where there is no such job."""
        live = self._by_job.get(job_id)
        return [] if live is None else list(live.open_keys)

    def cancelled(self, job_id: str) -> None:
        """The inputs of the job are being aborted, because its client or run has ended it."""
        self._by_job[job_id].error = ClientClosed("cancelled")

    def drop_plan(self, completion: PlanCompletion) -> list[int]:
        """Forget the jobs of a plan without emitting their ends: the plan was cancelled. Returns their keys."""
        keys: list[int] = []
        for live in [live for live in self._by_job.values() if live.completion is completion]:
            keys += live.open_keys
            self._forget(live)
        return keys

    def fail_all(self, reason: str) -> None:
        """End every job: the process is lost."""
        for live in list(self._by_job.values()):
            self._end(live, live.error or WorkerLost(reason))

    def outcome(self, live: InputJob, error: GatewayError | None) -> Iterable[Delta | Done | Failed]:
        """What is emitted at the end of a job."""
        raise NotImplementedError

    def _add(self, job: InferenceJob, emit: Emit, completion: PlanCompletion, inputs: int) -> list[int]:
        """Keys for the inputs of a job."""
        live = self._by_job[job.job_id] = InputJob(job, emit, completion)
        for index in range(inputs):
            key = next(self._keys)
            live.open_keys[key] = index
            self._by_key[key] = live
        return list(live.open_keys)

    def _close(self, live: InputJob, key: int) -> None:
        """An input has left the process; with the last one the job ends."""
        del live.open_keys[key], self._by_key[key]
        if not live.open_keys:
            self._end(live, live.error)

    def _end(self, live: InputJob, error: GatewayError | None) -> None:
        self._forget(live)
        try:
            for item in self.outcome(live, error):
                live.emit(item)
        except Exception as raised:
            # A receiver that raises fails its own plan, not the other jobs of the process.
            live.completion.fail(raised)
        live.completion.job_ended()

    def _forget(self, live: InputJob) -> None:
        del self._by_job[live.job.job_id]
        for key in live.open_keys:
            del self._by_key[key]
        live.open_keys.clear()
