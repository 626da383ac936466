"""Route key: which workers may run a job. Batch key: which jobs may share a padded pass."""

import enum
from typing import Literal

from msgspec import Struct


class Task(enum.Enum):
    GENERATE = "generate"


OutputLength = Literal["short", "long"]


class RouteKey(Struct, frozen=True, gc=False):
    """Which workers may run a job.

    `model`: the name that the caller used. `precision`: the one that the tenant requires; None accepts any. `adapter`:
    the same name where it is a LoRA adapter. `isolation`: the tenant pool the job is bound to, if any. `avoid`: workers
    that lost the job; they get it again only if no other worker is up. `length`: whether the predicted output is short
    or long; None where the lane does not separate them.
    """

    model: str
    precision: str | None = None
    adapter: str | None = None
    isolation: str | None = None
    avoid: tuple[str, ...] = ()
    length: OutputLength | None = None


class BatchKey(Struct, frozen=True, gc=False):
    """Which jobs may share one padded pass. Used only for workers that pad."""

    route: RouteKey
    task: Task = Task.GENERATE
    streaming: bool = False
    attention: str | None = None
