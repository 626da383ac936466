"""Pooled calls, several jobs in one request where their batch keys are equal.

A request holds parts of jobs, mostly whole ones. Its response is split into the answers of the jobs. Where a server
refuses a request of several jobs, each job is sent again in a request of its own, so that an invalid input fails only
its own job. All methods run on the worker's event loop.
"""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from inferry.domain.errors import ClientClosed, GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.pooling import PooledResult, encode_answer
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Item, Usage
from inferry.workers.openai_http.calls import MAX_ERROR_BODY_BYTES, Call, CallOwner
from inferry.workers.openai_http.non_streaming_calls import NonStreamingCall
from inferry.workers.openai_http.pooled_bodies import combined_job, read_results, repeated_bytes, split_tokens
from inferry.workers.plan_completion import PlanCompletion

MAX_RESULT_BYTES: Final = 262_144
"""Limit of a result in a response: a vector of 12,000 numbers in decimal."""

MAX_REPEATED_BYTES: Final = 262_144
"""A job that would repeat more of one text than this has a request of its own, which holds the text once."""


class Member:
    """One job. `results` are complete once none is `missing`."""

    __slots__ = ("completion", "emit", "is_ended", "job", "missing", "prompt_tokens", "results")

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> None:
        assert job.payload.pooled is not None
        self.job = job
        self.emit = emit
        self.completion = completion
        self.missing = job.payload.pooled.count
        self.results: list[PooledResult] = [0.0] * self.missing
        self.prompt_tokens = 0
        self.is_ended = False

    def add(self, start: int, results: list[PooledResult], prompt_tokens: int) -> None:
        self.results[start : start + len(results)] = results
        self.missing -= len(results)
        self.prompt_tokens += prompt_tokens
        if self.missing or self.is_ended:
            return
        job = self.job
        raw = encode_answer(self.results, self.prompt_tokens)
        self._emit_item(Delta(job.job_id, job.run_id, job.step_id, 0, raw=raw, is_last=True))
        self.finish(Done(job.job_id, FinishReason.STOP, Usage(self.prompt_tokens)))

    def fail(self, error: GatewayError) -> None:
        self.finish(Failed(self.job.job_id, error))

    def finish(self, end: Done | Failed) -> None:
        if not self.is_ended:
            self.is_ended = True
            self._emit_item(end)
            self.completion.job_ended()

    def _emit_item(self, item: Item) -> None:
        try:
            self.emit(item)
        except Exception as error:
            self.completion.fail(error)


class Part(NamedTuple):
    """The inputs from `start` to `stop` of a job."""

    member: Member
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class PooledCall(NonStreamingCall):
    """One request with the parts of one or several jobs. `on_end_of_call` is called once, when it has ended."""

    __slots__ = ("_on_end_of_call", "_results", "_sizes", "parts")

    def __init__(
        self, name: str, parts: list[Part], worker: CallOwner, on_end_of_call: "Callable[[PooledCall], None]"
    ) -> None:
        job, self._sizes = combined_job(name, [(part.member.job, part.start, part.stop) for part in parts])
        super().__init__(job, self._on_item, PlanCompletion(1), worker)
        self.parts = parts
        self._results: list[PooledResult] = []
        self._on_end_of_call = on_end_of_call
        self._max_bytes = MAX_ERROR_BODY_BYTES + MAX_RESULT_BYTES * self.size

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def members(self) -> list[Member]:
        return list(dict.fromkeys(part.member for part in self.parts))

    def _read_response(self, body: bytes) -> None:
        found = read_results(body, self.size)
        if found is None:
            self._scanner.error = b"invalid response"
            return
        self._results, prompt_tokens = found
        self._scanner.usage = Usage(prompt_tokens)
        self._scanner.finish = FinishReason.STOP

    def _on_item(self, item: Item) -> None:
        if isinstance(item, Done):
            self._split(item.usage.prompt_tokens)
        self._on_end_of_call(self)

    def _split(self, prompt_tokens: int) -> None:
        """Give every part its results and its share of the tokens: servers report the sum."""
        at = 0
        for part, tokens in zip(self.parts, split_tokens(prompt_tokens, self._sizes), strict=True):
            part.member.add(part.start, self._results[at : at + part.size], tokens)
            at += part.size


class PooledCalls:
    """The pooled jobs at one server. Their calls are among the worker's, `calls`.

    `further_open` and `further_ended` count the inputs beyond the first of every call: engines count inputs.
    """

    def __init__(self, worker: CallOwner, calls: dict[str, Call], max_inputs: int) -> None:
        self._worker = worker
        self._all_calls = calls
        self._max_inputs = max_inputs
        self._calls: dict[str, set[PooledCall]] = {}
        self._numbers = 0
        self.further_open = 0
        self.further_ended = 0

    def open(self, jobs: Iterable[InferenceJob], emit: Emit, completion: PlanCompletion) -> None:
        """Send the pooled ones of these jobs in as few requests as their batch keys and the limit of inputs allow."""
        groups: dict[object, list[Part]] = {}
        for job in jobs:
            if job.payload.pooled is None:
                continue
            member = Member(job, emit, completion)
            count = member.missing
            key = job.job_id if repeated_bytes(job) > MAX_REPEATED_BYTES else job.batch_key
            groups.setdefault(key, []).extend(
                Part(member, at, min(at + self._max_inputs, count)) for at in range(0, count, self._max_inputs)
            )
        calls = [self._call(parts) for group in groups.values() for parts in _packed(group, self._max_inputs)]
        for call in calls:
            self._start(call)

    def take(self, completion: PlanCompletion) -> list[PooledCall]:
        """Forget the open calls of a plan whose jobs have ended or are not awaited any more; return them."""
        if not self._calls:
            return []
        open_calls = dict.fromkeys(call for calls in self._calls.values() for call in calls)
        found = [call for call in open_calls if call.parts[0].member.completion is completion]
        for call in found:
            self._forget(call)
        return found

    def leave(self, job_ids: Iterable[str]) -> tuple[list[str], dict[str, list[str]], int]:
        """End the pooled ones of these jobs. Returns the other jobs, the calls without a job left with the jobs that
        each had, and the number of jobs whose calls continue for others.
        """
        others: list[str] = []
        emptied: dict[str, list[str]] = {}
        continuing = 0
        for job_id in job_ids:
            calls = self._calls.get(job_id)
            if calls is None:
                others.append(job_id)
                continue
            member = next(m for call in calls for m in call.members() if m.job.job_id == job_id)
            member.fail(ClientClosed("cancelled"))
            empty = [call for call in calls if all(m.is_ended for m in call.members())]
            for call in empty:
                emptied[call.job.job_id] = [m.job.job_id for m in call.members()]
            continuing += not empty
        return others, emptied, continuing

    def _start(self, call: PooledCall) -> None:
        self._all_calls[call.job.job_id] = call
        self._worker.send(call)

    def _call(self, parts: list[Part]) -> PooledCall:
        self._numbers += 1
        call = PooledCall(f"{parts[0].member.job.job_id}-p{self._numbers}", parts, self._worker, self._ended)
        for member in call.members():
            self._calls.setdefault(member.job.job_id, set()).add(call)
        self.further_open += call.size - 1
        return call

    def _ended(self, call: PooledCall) -> None:
        self._forget(call)
        end = call.end
        if not isinstance(end, Failed):
            return
        members = call.members()
        open_members = [member for member in members if not member.is_ended]
        if len(members) > 1 and end.error.status == 400:
            for member in open_members:
                self._start(self._call([part for part in call.parts if part.member is member]))
            return
        for member in open_members:
            member.fail(end.error)

    def _forget(self, call: PooledCall) -> None:
        self.further_open -= call.size - 1
        self.further_ended += call.size - 1
        for member in call.members():
            calls = self._calls[member.job.job_id]
            calls.discard(call)
            if not calls:
                del self._calls[member.job.job_id]


def _packed(parts: list[Part], max_inputs: int) -> list[list[Part]]:
    """Parts in order, as many in a request as the limit allows."""
    requests: list[list[Part]] = []
    size = max_inputs
    for part in parts:
        if size + part.size > max_inputs:
            requests.append([])
            size = 0
        requests[-1].append(part)
        size += part.size
    return requests
