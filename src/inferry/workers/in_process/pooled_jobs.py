"""The pooled jobs that an engine process holds: one sequence for each input, one answer for each job."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from inferry.domain.errors import ContextLengthExceeded, GatewayError, UpstreamRefused
from inferry.domain.jobs import InferenceJob
from inferry.domain.pooling import cosine, encode_answer
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.engine.messages import Aborted, Account, Rejected, Request, StepDone
from inferry.workers.in_process.input_jobs import InputJob, InputJobs
from inferry.workers.plan_completion import PlanCompletion


class PooledJobs(InputJobs):
    """`keys` gives the keys of sequences; `abort` aborts keys in the engine; `labels` names those of its model."""

    def __init__(
        self, keys: "count[int]", abort: Callable[[list[int]], object], labels: Callable[[], Sequence[str]]
    ) -> None:
        super().__init__(keys)
        self._abort = abort
        self._labels = labels

    def add(
        self, job: InferenceJob, emit: Emit, completion: PlanCompletion, batch: int = 0, adapter: int = 0
    ) -> list[Request]:
        """The engine's requests for a job whose inputs are token ids, with the numbers of its batch key and adapter."""
        inputs = job.payload.pooled
        assert inputs is not None
        assert inputs.ids is not None
        keys, sampling = self._add(job, emit, completion, len(inputs.ids)), job.payload.sampling
        return [
            Request(
                key, list(ids), sampling, job.lane, pooled=True, batch=batch, adapter=adapter, is_batch=job.is_batch
            )
            for key, ids in zip(keys, inputs.ids, strict=True)
        ]

    def drop_plan(self, completion: PlanCompletion) -> list[int]:
        """Also aborts the jobs."""
        keys = super().drop_plan(completion)
        if keys:
            self._abort(keys)
        return keys

    def on_message(self, message: StepDone | Aborted | Rejected) -> None:
        match message:
            case StepDone(_, ends, _, pooled) if pooled:
                results = dict(pooled)
                for end in ends:
                    key = end.account.key
                    live = self._by_key.get(key)
                    if live is not None:
                        live.results[live.open_keys[key]] = results[key]
                        self._close_with(live, end.account)
            case Aborted(_, freed):
                for account in freed:
                    live = self._by_key.get(account.key)
                    if live is not None:
                        self._close_with(live, account)
            case Rejected(key, too_long, text):
                live = self._by_key.get(key)
                if live is not None:
                    text = f"input {live.open_keys[key]}: {text}"
                    live.error = ContextLengthExceeded(text) if too_long else UpstreamRefused(text)
                    self._close(live, key)
                    if live.open_keys:
                        self._abort(list(live.open_keys))

    def outcome(self, live: InputJob, error: GatewayError | None) -> Iterator[Delta | Done | Failed]:
        job, usage = live.job, Usage(live.prompt_tokens, 0, 0, live.seconds)
        if error is not None:
            yield Failed(job.job_id, error, usage)
        else:
            yield Delta(job.job_id, job.run_id, job.step_id, 0, raw=self._answer(live), is_last=True)
            yield Done(job.job_id, FinishReason.STOP, usage)

    def _close_with(self, live: InputJob, account: Account) -> None:
        live.prompt_tokens += account.prompt_tokens
        live.seconds += account.gpu_seconds
        self._close(live, account.key)

    def _answer(self, live: InputJob) -> bytes:
        inputs = live.job.payload.pooled
        assert inputs is not None
        if inputs.pairs is None:
            return live.pooled_answer(live.prompt_tokens, self._labels())
        # Scores by the embeddings of both texts.
        found = [cosine(live.results[a], live.results[b]) for a, b in inputs.pairs]
        return encode_answer(found, live.prompt_tokens)
