"""The jobs that an engine process holds: tokens to deltas, ends, and aborts as awaited results.

A job is in the table from the moment it is sent until its end is emitted, which happens exactly once, in `_end`.
"""

import asyncio
from collections.abc import Callable

from inferry.domain.errors import (
    ClientClosed,
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    NoWorker,
    UpstreamRefused,
    WorkerLost,
)
from inferry.domain.ports import TextAssembler
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.engine.messages import Abort, Aborted, Account, Rejected, StepDone, ToEngine, TokenLogprobs
from inferry.workers.in_process.engine_jobs import LiveJob, to_usage
from inferry.workers.plan_completion import PlanCompletion


class LiveJobs:
    """`send` sends a message to the engine, and returns False where none is connected."""

    def __init__(
        self, make_assembler: Callable[[tuple[str, ...]], TextAssembler], send: Callable[[ToEngine], bool]
    ) -> None:
        self._make_assembler = make_assembler
        self._send = send
        self._by_key: dict[int, LiveJob] = {}
        self._by_job: dict[str, LiveJob] = {}
        self._aborts: dict[int, asyncio.Future[None]] = {}
        self._abort_calls = 0

    @property
    def is_busy(self) -> bool:
        """Whether the engine owes a message about a job."""
        return bool(self._by_key or self._aborts)

    def add(self, live: LiveJob) -> None:
        self._by_key[live.key] = self._by_job[live.job.job_id] = live

    def find(self, job_id: str) -> LiveJob | None:
        return self._by_job.get(job_id)

    def abort(self, keys: list[int]) -> "asyncio.Future[None]":
        """Abort these keys. The result is done when the engine has freed them or is lost."""
        self._abort_calls += 1
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._send(Abort(self._abort_calls, keys)):
            self._aborts[self._abort_calls] = confirmed
        else:
            confirmed.set_result(None)
        return confirmed

    def drop_plan(self, completion: PlanCompletion) -> None:
        """Abort the jobs of a plan without emitting their ends: the plan was cancelled."""
        keys = [live.key for live in self._by_key.values() if live.completion is completion]
        for key in keys:
            self._drop(self._by_key[key])
        if keys:
            self.abort(keys)

    def fail_all(self, reason: str) -> None:
        """End every job: the engine is lost."""
        for live in list(self._by_key.values()):
            computed = len(live.prompt_ids) + len(live.earlier_ids) if live.index else 0
            usage = Usage(computed, 0, len(live.output_ids))
            if live.stop_index is not None:
                self._end(live, Done(live.job.job_id, FinishReason.STOP, usage, stop_reason=live.stop_string))
            else:
                error = ClientClosed("cancelled") if live.cancelled else WorkerLost(reason)
                self._end(live, Failed(live.job.job_id, error, usage, live.resume_point(self._make_assembler)))
        for confirmed in self._aborts.values():
            if not confirmed.done():
                confirmed.set_result(None)
        self._aborts.clear()

    # -- messages of the engine --------------------------------------------------------------------------------------

    def on_message(self, message: StepDone | Aborted | Rejected) -> None:
        match message:
            case StepDone(tokens, ends, logprobs=logprobs):
                found = {one.key: one for one in logprobs} if logprobs else {}
                for key, token in tokens:
                    live = self._by_key.get(key)
                    if live is not None:
                        self._push(live, token, found.get(key))
                for end in ends:
                    live = self._by_key.get(end.account.key)
                    if live is not None and end.error is not None:
                        error = NoWorker(end.error) if end.is_busy else _invalid_constraint(live, end.error)
                        self._end(live, Failed(live.job.job_id, error, to_usage(live, end.account)))
                    elif live is not None:
                        is_stopped = end.stopped or live.stop_index is not None
                        self._finish(live, end.account, is_stopped)
            case Aborted(call, freed):
                for account in freed:
                    live = self._by_key.get(account.key)
                    if live is not None:
                        self._on_freed(live, account)
                confirmed = self._aborts.pop(call, None)
                if confirmed is not None and not confirmed.done():
                    confirmed.set_result(None)
            case Rejected():
                self._on_rejected(message)

    def _push(self, live: LiveJob, token: int, logprobs: TokenLogprobs | None) -> None:
        if live.stop_index is not None:
            return
        assert live.assembler is not None
        text, stopped = live.assembler.push((token,))
        live.output_ids.append(token)
        if stopped:
            live.stop_index = len(live.output_ids)
            self.abort([live.key])
        entry = b"" if live.logprobs is None or logprobs is None else live.logprobs.entry(token, logprobs)
        self.emit(live, text, (token,), entry)

    def _finish(self, live: LiveJob, account: Account, is_stopped: bool) -> None:
        if live.stop_index is None:
            self._flush(live)
        finish = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        usage, events, raw = to_usage(live, account), live.events, b""
        if events is not None:
            if is_stopped and live.stop_index is None and events.has_calls:
                finish = FinishReason.TOOL_CALLS
            if ended := events.finish(finish, live.stop_string):
                self._emit_raw(live, ended)
            raw = events.usage(usage)
        self._end(live, Done(live.job.job_id, finish, usage, raw, stop_reason=live.stop_string))

    def _on_freed(self, live: LiveJob, account: Account) -> None:
        if live.stop_index is not None:
            self._finish(live, account, True)
            return
        resume_point = live.resume_point(self._make_assembler)
        error = ClientClosed("cancelled")
        self._end(live, Failed(live.job.job_id, error, to_usage(live, account), resume_point))

    def _on_rejected(self, rejected: Rejected) -> None:
        live = self._by_key.get(rejected.key)
        if live is not None and rejected.too_long and live.earlier_ids:
            # The prompt fitted before: prompt and output have reached the end of the context.
            self._drop(live)
            self.finish_without_engine(live, FinishReason.LENGTH)
        elif live is not None:
            message = rejected.message
            error = ContextLengthExceeded(message) if rejected.too_long else UpstreamRefused(message)
            self._end(live, Failed(live.job.job_id, error))

    # -- items -------------------------------------------------------------------------------------------------------

    def emit(self, live: LiveJob, text: str, token_ids: tuple[int, ...], logprobs: bytes = b"") -> None:
        """Emit text. `logprobs`: the entry of its token, of a job that asks for it."""
        if live.events is not None:
            self._emit_raw(live, live.events.push(text, token_ids, logprobs), token_ids)
            return
        job = live.job
        self._deliver(live, Delta(job.job_id, job.run_id, job.step_id, live.index, text, token_ids, len(token_ids)))

    def _emit_raw(self, live: LiveJob, events: bytes, token_ids: tuple[int, ...] = ()) -> None:
        job, tokens = live.job, len(token_ids)
        self._deliver(live, Delta(job.job_id, job.run_id, job.step_id, live.index, "", token_ids, tokens, events))

    def _deliver(self, live: LiveJob, delta: Delta) -> None:
        live.index += 1
        try:
            live.emit(delta)
        except Exception as error:
            # A receiver that raises fails its own plan, not the other jobs of the step.
            live.completion.fail(error)
            self.drop_plan(live.completion)

    def finish_without_engine(self, live: LiveJob, finish: FinishReason) -> None:
        """End a job whose earlier attempt had its last token: only text that was held back is left."""
        self._flush(live)
        live.end(Done(live.job.job_id, finish, Usage()))

    def _flush(self, live: LiveJob) -> None:
        assert live.assembler is not None
        rest = live.assembler.finish()
        if rest:
            self.emit(live, rest, ())

    def _end(self, live: LiveJob, end: Done | Failed) -> None:
        if self._drop(live):
            live.end(end)

    def _drop(self, live: LiveJob) -> bool:
        if self._by_key.pop(live.key, None) is None:
            return False
        if self._by_job.get(live.job.job_id) is live:
            del self._by_job[live.job.job_id]
        return True


def _invalid_constraint(live: LiveJob, reason: str) -> GatewayError:
    """The error of a job whose constraint the engine cannot compile or match."""
    constraint = live.job.payload.sampling.constraint
    param = "response_format" if constraint is None else constraint.param
    return InvalidRequest(f"`{param}` cannot be enforced: {reason}", param=param)
