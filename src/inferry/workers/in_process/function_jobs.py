"""The jobs whose inputs the process of a Python function holds. It returns whole answers, so a job has one delta."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec

from inferry.domain.errors import GatewayError, InternalError, UpstreamRefused
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.engine.messages import Aborted, Returned
from inferry.workers.in_process.input_jobs import InputJob, InputJobs
from inferry.workers.plan_completion import PlanCompletion

BYTES_PER_TOKEN = 4
"""What counts as a token of a text: the function has no tokenizer, and limits and prices are in tokens."""


class FunctionJobs(InputJobs):
    """`measures_gpu`: the time of the function is GPU time."""

    def __init__(self, measures_gpu: bool) -> None:
        super().__init__(count(1))
        self._measures_gpu = measures_gpu

    def add(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> list[tuple[int, Any]]:
        """The inputs of a job, by key."""
        inputs = inputs_of(job)
        return list(zip(self._add(job, emit, completion, len(inputs)), inputs, strict=True))

    def on_message(self, message: Returned | Aborted) -> None:
        if isinstance(message, Aborted):
            for account in message.freed:
                if (live := self._by_key.get(account.key)) is not None:
                    self._close(live, account.key)
            return
        share_s = message.seconds / max(1, len(message.results) + len(message.errors))
        for key, result in message.results:
            if (live := self._by_key.get(key)) is not None:
                live.results[live.open_keys[key]] = result
                live.seconds += share_s
                self._close(live, key)
        for key, text, is_broken in message.errors:
            if (live := self._by_key.get(key)) is not None:
                live.error = live.error or (InternalError(text) if is_broken else UpstreamRefused(text))
                live.seconds += share_s
                self._close(live, key)

    def outcome(self, live: InputJob, error: GatewayError | None) -> Iterator[Delta | Done | Failed]:
        job, gpu_seconds = live.job, live.seconds if self._measures_gpu else None
        prompt_tokens = job.footprint.prompt.expected if live.seconds else 0
        if error is not None:
            yield Failed(job.job_id, error, Usage(prompt_tokens, 0, 0, gpu_seconds))
        elif job.payload.pooled is not None:
            yield _delta(job, raw=live.pooled_answer(prompt_tokens))
            yield Done(job.job_id, FinishReason.STOP, Usage(prompt_tokens, 0, 0, gpu_seconds))
        else:
            text, tokens, finish, stop = limited(live.results[0].decode(), job)
            yield _delta(job, text=text, tokens=tokens)
            yield Done(job.job_id, finish, Usage(prompt_tokens, 0, tokens, gpu_seconds), stop_reason=stop)


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
        case other:
            raise InternalError(f"functions have no task for {other}")


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


def _delta(job: InferenceJob, *, text: str = "", tokens: int = 0, raw: bytes = b"") -> Delta:
    return Delta(job.job_id, job.run_id, job.step_id, 0, text, (), tokens, raw, is_last=True)
