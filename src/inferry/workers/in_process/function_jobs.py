"""The jobs whose inputs the process of a Python function holds.

A job is in the table from the moment its inputs are sent until its end is emitted, which happens exactly once, in
`_end`. The function returns whole answers, so a job has one delta.
"""

from itertools import count
from typing import Any

import msgspec

from inferry.domain.errors import ClientClosed, GatewayError, InternalError, UpstreamRefused, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.pooling import encode_answer, encode_result
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.engine.messages import Aborted, Returned
from inferry.workers.plan_completion import PlanCompletion

BYTES_PER_TOKEN = 4
"""What counts as a token of a text: the function has no tokenizer, and limits and prices are in tokens."""


class FunctionJob:
    """`open_keys` are its inputs in the process, by key, with their index."""

    __slots__ = ("completion", "emit", "error", "job", "open_keys", "results", "seconds")

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> None:
        self.job = job
        self.emit = emit
        self.completion = completion
        self.open_keys: dict[int, int] = {}
        self.results: dict[int, bytes] = {}
        self.seconds = 0.0
        self.error: GatewayError | None = None


class FunctionJobs:
    """`measures_gpu`: the time of the function is GPU time."""

    def __init__(self, measures_gpu: bool) -> None:
        self._measures_gpu = measures_gpu
        self._keys = count(1)
        self._by_key: dict[int, FunctionJob] = {}
        self._by_job: dict[str, FunctionJob] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._by_job)

    def add(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> list[tuple[int, Any]]:
        """The inputs of a job, by key."""
        live = self._by_job[job.job_id] = FunctionJob(job, emit, completion)
        inputs = [(next(self._keys), given) for given in inputs_of(job)]
        for index, (key, _) in enumerate(inputs):
            live.open_keys[key] = index
            self._by_key[key] = live
        return inputs

    def has(self, job_id: str) -> bool:
        return job_id in self._by_job

    def cancel(self, job_id: str) -> list[int]:
        """The inputs of a job that its client or run has ended."""
        live = self._by_job[job_id]
        live.error = ClientClosed("cancelled")
        return list(live.open_keys)

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

    def on_message(self, message: Returned | Aborted) -> None:
        if isinstance(message, Aborted):
            for account in message.freed:
                self._close(account.key)
            return
        share_s = message.seconds / max(1, len(message.results) + len(message.errors))
        for key, result in message.results:
            if (live := self._by_key.get(key)) is not None:
                live.results[live.open_keys[key]] = result
                self._close(key, share_s)
        for key, text, is_broken in message.errors:
            if (live := self._by_key.get(key)) is not None:
                live.error = live.error or (InternalError(text) if is_broken else UpstreamRefused(text))
                self._close(key, share_s)

    def _close(self, key: int, seconds: float = 0.0) -> None:
        """An input has left the process; with the last one the job ends."""
        live = self._by_key.pop(key, None)
        if live is None:
            return
        del live.open_keys[key]
        live.seconds += seconds
        if not live.open_keys:
            self._end(live, live.error)

    def _end(self, live: FunctionJob, error: GatewayError | None) -> None:
        self._forget(live)
        job, gpu_seconds = live.job, live.seconds if self._measures_gpu else None
        prompt_tokens = job.footprint.prompt.expected if live.seconds else 0
        try:
            if error is not None:
                live.emit(Failed(job.job_id, error, Usage(prompt_tokens, 0, 0, gpu_seconds)))
            elif job.payload.pooled is not None:
                live.emit(_delta(job, raw=_pooled_answer(live, prompt_tokens)))
                live.emit(Done(job.job_id, FinishReason.STOP, Usage(prompt_tokens, 0, 0, gpu_seconds)))
            else:
                text, tokens, finish, stop = limited(live.results[0].decode(), job)
                live.emit(_delta(job, text=text, tokens=tokens))
                usage = Usage(prompt_tokens, 0, tokens, gpu_seconds)
                live.emit(Done(job.job_id, finish, usage, stop_reason=stop))
        except Exception as raised:
            # A receiver that raises fails its own plan, not the other jobs of the call.
            live.completion.fail(raised)
        live.completion.job_ended()

    def _forget(self, live: FunctionJob) -> None:
        del self._by_job[live.job.job_id]
        for key in live.open_keys:
            del self._by_key[key]
        live.open_keys.clear()


def inputs_of(job: InferenceJob) -> list[Any]:
    """What the function gets: texts to embed, pairs of texts to score, a prompt, or the messages of a chat."""
    body = msgspec.json.decode(job.payload.body)
    match job.payload.api:
        case "embeddings":
            return list(body["input"])
        case "score":
            firsts, seconds = body["text_1"], body["text_2"]
            return list(zip(firsts if len(firsts) > 1 else firsts * len(seconds), seconds, strict=True))
        case "chat":
            return [body["messages"]]
        case "completions":
            prompt = body["prompt"]
            return prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]


def limited(text: str, job: InferenceJob) -> tuple[str, int, FinishReason, str | None]:
    """The text up to a stop string and the output limit, its tokens, and why it ended."""
    sampling = job.payload.sampling
    found = [(at + len(stop), at, stop) for stop in sampling.stop if stop and (at := text.find(stop)) >= 0]
    stop: str | None = None
    if found:
        _, at, stop = min(found)
        text = text[:at]
    limit = sampling.max_tokens if job.payload.output_cap is None else min(sampling.max_tokens, job.payload.output_cap)
    encoded = text.encode()
    if len(encoded) > limit * BYTES_PER_TOKEN:
        text = encoded[: limit * BYTES_PER_TOKEN].decode(errors="ignore")
        return text, limit, FinishReason.LENGTH, None
    return text, max(1, -(-len(encoded) // BYTES_PER_TOKEN)), FinishReason.STOP, stop


def _pooled_answer(live: FunctionJob, prompt_tokens: int) -> bytes:
    inputs = live.job.payload.pooled
    assert inputs is not None
    results = [live.results[index] for index in range(len(live.results))]
    if live.job.payload.api == "score":
        return encode_answer([memoryview(one).cast("f")[0] for one in results], prompt_tokens)
    return encode_answer([encode_result(one, inputs.dimensions) for one in results], prompt_tokens)


def _delta(job: InferenceJob, *, text: str = "", tokens: int = 0, raw: bytes = b"") -> Delta:
    return Delta(job.job_id, job.run_id, job.step_id, 0, text, (), tokens, raw, is_last=True)
