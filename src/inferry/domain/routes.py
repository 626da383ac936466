"""Route key: which workers may run a job. Batch key: which jobs may share a padded pass."""

import enum

from msgspec import Struct


class Task(enum.Enum):
    GENERATE = "generate"


class RouteKey(Struct, frozen=True, gc=False):
    """Which workers may run a job.

    `isolation`: the tenant pool the job is bound to, if any. `avoid`: workers that lost the job; they get it again only
    if no other worker is up.
    """

    model: str
    precision: str | None = None
    adapter: str | None = None
    isolation: str | None = None
    avoid: tuple[str, ...] = ()


class BatchKey(Struct, frozen=True, gc=False):
    """Which jobs may share one padded pass. Used only for workers that pad."""

    route: RouteKey
    task: Task = Task.GENERATE
    streaming: bool = False
    attention: str | None = None
