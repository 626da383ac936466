"""Output of a worker: deltas, then exactly one end per job."""

import enum
from typing import Any, Final

from inferry.domain.errors import GatewayError
from inferry.domain.jobs import ResumePoint
from inferry.domain.values import Value


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


class Usage(Value):
    """Tokens and GPU time of one attempt. `gpu_seconds` is None if neither measured nor estimated."""

    def __init__(
        self,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        gpu_seconds: float | None = None,
    ) -> None:
        self.prompt_tokens: Final = prompt_tokens
        self.cached_tokens: Final = cached_tokens
        self.output_tokens: Final = output_tokens
        self.gpu_seconds: Final = gpu_seconds


NO_USAGE: Final = Usage()


class Delta(Value):
    """The next piece of a job's output; `index` counts from 0 without gaps.

    `raw`: complete server-sent events as received, passed on without re-encoding. `tokens`: output tokens of the piece.
    `is_last`: the job's end follows in the same call, so both can be written together.
    """

    def __init__(
        self,
        job_id: str,
        run_id: str,
        step_id: str,
        index: int,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        tokens: int = 0,
        raw: bytes = b"",
        is_last: bool = False,
    ) -> None:
        self.job_id: Final = job_id
        self.run_id: Final = run_id
        self.step_id: Final = step_id
        self.index: Final = index
        self.text: Final = text
        self.token_ids: Final = token_ids
        self.tokens: Final = tokens
        self.raw: Final = raw
        self.is_last: Final = is_last


class Done(Value):
    """Successful end of a job.

    `raw`: the upstream's usage event. `stopped`: the exhausted budget that ended the output, enforced by the gateway
    or, if `stopped_by_engine`, by a reduced output limit. `stop_reason`: the stop string or token that ended the
    output, of a job whose deltas have no raw events.
    `shape`: null fields of the server's non-streaming answers, if known (`domain.response_shapes`).
    """

    def __init__(
        self,
        job_id: str,
        finish: FinishReason,
        usage: Usage,
        raw: bytes = b"",
        stopped: GatewayError | None = None,
        stopped_by_engine: bool = False,
        stop_reason: str | int | None = None,
        shape: dict[str, Any] | None = None,
    ) -> None:
        self.job_id: Final = job_id
        self.finish: Final = finish
        self.usage: Final = usage
        self.raw: Final = raw
        self.stopped: Final = stopped
        self.stopped_by_engine: Final = stopped_by_engine
        self.stop_reason: Final = stop_reason
        self.shape: Final = shape


class Failed(Value):
    """Unsuccessful end of a job. Output delivered before remains valid.

    `resume_point`: where another worker can continue; None if unknown or not exact.
    """

    def __init__(
        self,
        job_id: str,
        error: GatewayError,
        usage: Usage = NO_USAGE,
        resume_point: ResumePoint | None = None,
    ) -> None:
        self.job_id: Final = job_id
        self.error: Final = error
        self.usage: Final = usage
        self.resume_point: Final = resume_point


class Placed(Value):
    """Where a job runs that its worker has passed on: worker, seconds in the queue, size of the batch.

    `shared_with`: the job whose execution this is, where it is not the job's own; `is_replay`: its answer was cached.
    """

    def __init__(
        self,
        job_id: str,
        worker: str,
        queue_s: float,
        batch_size: int,
        shared_with: str | None = None,
        is_replay: bool = False,
    ) -> None:
        self.job_id: Final = job_id
        self.worker: Final = worker
        self.queue_s: Final = queue_s
        self.batch_size: Final = batch_size
        self.shared_with: Final = shared_with
        self.is_replay: Final = is_replay


class Restarted(Value):
    """The worker runs another attempt of the job itself: indexes of deltas begin at 0 again.

    It continues from `resume_point`; None voids the output so far. `attempt` is its number.
    """

    def __init__(self, job_id: str, attempt: int, resume_point: ResumePoint | None = None) -> None:
        self.job_id: Final = job_id
        self.attempt: Final = attempt
        self.resume_point: Final = resume_point


Item = Delta | Done | Failed | Placed | Restarted
End = Done | Failed
