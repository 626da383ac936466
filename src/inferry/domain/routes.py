"""Route key: which workers may run a job. Batch key: which jobs may share a padded pass."""

import enum
from typing import Literal

from msgspec import Struct


class Task(enum.Enum):
    """What a model does with a call. The others than GENERATE are pooled: one result per input, and no tokens."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"


ALL_TASKS = frozenset(Task)
GENERATES = frozenset({Task.GENERATE})


OutputLength = Literal["short", "long"]
WorkerRole = Literal["both", "prefill", "decode"]
"""What a worker computes of a call: all of it, its prompt alone, or what follows a prompt computed elsewhere (and whole
calls)."""


class RouteKey(Struct, frozen=True, gc=False):
    """Which workers may run a job.

    `model`: the name that the caller used. `precision`: the one that the tenant requires; None accepts any. `adapter`:
    the same name where it is a LoRA adapter. `isolation`: the tenant pool the job is bound to, if any. `avoid`: workers
    that lost the job; they get it again only if no other worker is up. `length`: whether the predicted output is short
    or long; None where the lane does not separate them. `pooled`: the job generates nothing. It has a queue of its own
    beside jobs that generate. `overflow`: the job goes to a worker for overflow, and to no other. `role`: with
    `prefill` only the prompt is to be computed, on a worker of that role; with `decode` it was, and workers of that
    role, which can take its KV over, come first.
    """

    model: str
    precision: str | None = None
    adapter: str | None = None
    isolation: str | None = None
    avoid: tuple[str, ...] = ()
    length: OutputLength | None = None
    pooled: bool = False
    overflow: bool = False
    role: Literal["prefill", "decode"] | None = None


class BatchKey(Struct, frozen=True, gc=False):
    """Which jobs may share one pass: a padded pass, or one request for several pooled jobs.

    A pass runs on one worker, and so has one precision and one attention backend whatever its jobs.
    `bucket`: the scheduler's, where the lane separates padded passes by prompt length.
    `group`: pooled jobs with different groups never share a request. It holds the tenant where prefix caches are
    salted, and a digest of the options that apply to a whole request.
    """

    route: RouteKey
    task: Task = Task.GENERATE
    streaming: bool = False
    group: str | None = None
    bucket: int | None = None
