"""Which workers may take a job, and which jobs may share a padded pass."""

import enum

from msgspec import Struct


class Task(enum.Enum):
    GENERATE = "generate"


class RouteKey(Struct, frozen=True, gc=False):
    """Which workers may take a job. `isolation` names the tenant pool it must stay in, if any.

    `avoid` names workers that get it only where nobody else is up: those that have lost it.
    """

    model: str
    precision: str | None = None
    adapter: str | None = None
    isolation: str | None = None
    avoid: tuple[str, ...] = ()


class BatchKey(Struct, frozen=True, gc=False):
    """What may share one padded pass. It splits queues only in front of workers that pad."""

    route: RouteKey
    task: Task = Task.GENERATE
    streaming: bool = False
    attention: str | None = None
