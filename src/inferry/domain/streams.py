"""What comes back from a worker: deltas, then exactly one end."""

import enum
from typing import Any

from msgspec import Struct

from inferry.domain.errors import GatewayError
from inferry.domain.jobs import SoFar


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


class Usage(Struct, frozen=True, gc=False):
    """Tokens and engine time of one attempt. `gpu_seconds` is None where nobody measured or estimated it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_seconds: float | None = None


class Delta(Struct, frozen=True, gc=False):
    """The next piece of a job's output; `index` counts from 0 without gaps.

    `raw` holds the server-sent events as they came from upstream, complete ones only, so that passing them on costs no
    re-encoding. `tokens` is how many output tokens the piece stands for. `is_last` says that the job's end follows at
    once, in the same call: whoever passes things on may do both together.
    """

    job_id: str
    run_id: str
    step_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    tokens: int = 0
    raw: bytes = b""
    is_last: bool = False


class Done(Struct, frozen=True, gc=False):
    """The end of a job that ran. `raw` is the upstream's usage event, which only some clients asked for.

    `stopped` says that a budget ended it which was used up: the gateway did, in the middle of it, or `by_engine`, whose
    limit was set to what was left. `stop_reason` is the stop string or token that ended a job which went on elsewhere.
    `shape` is how the server writes an answer in one piece, where it has shown it (`domain.shapes`).
    """

    job_id: str
    finish: FinishReason
    usage: Usage
    raw: bytes = b""
    stopped: GatewayError | None = None
    by_engine: bool = False
    stop_reason: str | int | None = None
    shape: dict[str, Any] | None = None


class Failed(Struct, frozen=True):
    """The end of a job that did not. What was delivered before stands.

    `so_far` is what another worker needs to go on from there; None where it is not known, or would not be exact.
    """

    job_id: str
    error: GatewayError
    usage: Usage = Usage()
    so_far: SoFar | None = None


Item = Delta | Done | Failed
End = Done | Failed
