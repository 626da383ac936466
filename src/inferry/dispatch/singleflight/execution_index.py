"""Where executions in flight are found: by prompt, by the call they repeat, by the job that leads them."""

from collections.abc import Iterator
from typing import Final

from inferry.dispatch.singleflight.execution import Execution, PromptKey
from inferry.dispatch.singleflight.request_key import is_deterministic
from inferry.dispatch.singleflight.response_cache import RepeatKey
from inferry.domain.jobs import InferenceJob

MAX_COMPARED: Final = 8
"""Executions with the same prompt hash that are compared: the newest ones."""


class ExecutionIndex:
    """`shares_identical` says whether deterministic calls with equal bodies share an execution."""

    def __init__(self, shares_identical: bool) -> None:
        self._shares_identical = shares_identical
        self._by_prompt: dict[PromptKey, list[Execution]] = {}
        self._by_call: dict[RepeatKey, Execution] = {}
        self._by_leader: dict[str, Execution] = {}

    def __len__(self) -> int:
        return len(self._by_leader)

    def __iter__(self) -> Iterator[Execution]:
        return iter(self._by_leader.values())

    def led_by(self, job_id: str) -> Execution | None:
        return self._by_leader.get(job_id)

    def find_repeat(self, job: InferenceJob) -> Execution | None:
        """The execution of the call that this one repeats."""
        call = repeat_key(job)
        execution = None if call is None else self._by_call.get(call)
        return (
            execution
            if execution is not None and execution.is_joinable and execution.request_key.matches(job)
            else None
        )

    def find_identical(self, job: InferenceJob) -> Execution | None:
        """An execution in flight that answers this job too, and delays it no longer than an execution of its own."""
        if not (self._shares_identical and is_deterministic(job)):
            return None
        for execution in reversed(self._by_prompt.get(_prompt_key_of(job), ())[-MAX_COMPARED:]):
            leader = execution.job
            is_queued = execution.source.attempt.sent_at is None
            if (
                leader.lane <= job.lane
                and not (is_queued and leader.arrived_at + leader.max_wait_s > job.arrived_at + job.max_wait_s)
                and execution.is_joinable
                and execution.request_key.matches(job)
            ):
                return execution
        return None

    def add(self, execution: Execution, executed: InferenceJob) -> None:
        """`executed` is the leader's job as it was admitted."""
        job = execution.job
        self._by_leader[job.job_id] = execution
        # An answer that a budget cuts short answers no other call.
        if self._shares_identical and is_deterministic(job) and executed.payload.output_cap is None:
            execution.prompt_key = _prompt_key_of(job)
            self._by_prompt.setdefault(execution.prompt_key, []).append(execution)
        execution.call = repeat_key(job)
        if execution.call is not None:
            self._by_call[execution.call] = execution

    def hide(self, execution: Execution) -> None:
        """No job joins the execution any more. It stays known by its leader until `remove`."""
        if execution.prompt_key is not None:
            candidates = self._by_prompt[execution.prompt_key]
            candidates.remove(execution)
            if not candidates:
                del self._by_prompt[execution.prompt_key]
            execution.prompt_key = None
        if execution.call is not None and self._by_call.get(execution.call) is execution:
            del self._by_call[execution.call]
        execution.stop_lingering()

    def remove(self, execution: Execution) -> None:
        self.hide(execution)
        del self._by_leader[execution.job.job_id]


def repeat_key(job: InferenceJob) -> RepeatKey | None:
    """Equal for calls that are the same one, as their client says."""
    return None if job.repeat is None or job.repeat.name is None else (job.tenant, job.repeat.name)


def _prompt_key_of(job: InferenceJob) -> PromptKey:
    """Equal for jobs that may be identical: cheap, and no proof."""
    return job.tenant, job.prompt_hash, job.payload.sampling.seed
