"""What comes back from a worker: deltas, then exactly one end."""

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
    """Tokens and engine time of one attempt. `gpu_seconds` is None where nobody measured or estimated it."""

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


NO_USAGE = Usage()


class Delta(Value):
    """The next piece of a job's output; `index` counts from 0 without gaps.

    `raw` holds the server-sent events as they came from upstream, complete ones only, so that passing them on costs no
    re-encoding. `tokens` is how many output tokens the piece stands for. `is_last` says that the job's end follows at
    once, in the same call: whoever passes things on may do both together.
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
    """The end of a job that ran. `raw` is the upstream's usage event, which only some clients asked for.

    `stopped` says that a budget ended it which was used up: the gateway did, in the middle of it, or
    `stopped_by_engine`, whose limit was set to what was left. `stop_reason` is the stop string or token that ended a
    job which went on elsewhere. `shape` is how the server writes an answer in one piece, where it has shown it
    (`domain.response_shapes`).
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
    """The end of a job that did not. What was delivered before stands.

    `resume_point` is what another worker needs to go on from there; None where it is not known, or would not be exact.
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


Item = Delta | Done | Failed
End = Done | Failed
