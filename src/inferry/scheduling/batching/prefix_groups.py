"""Siblings: jobs of one run or one template that begin alike and are ready at the same time go together.

The first of them pays for the prefix, the others find it warm. They go to the worker that takes the first, in one plan,
as far as there is room and for one quantum of prompt tokens at most: that is what others may have to wait for.
"""

from collections import deque
from collections.abc import Iterator

from inferry.scheduling.queues.queued_job import READY, QueuedJob

PrefixGroupKey = tuple[str, str, str]


class PrefixGroup:
    """Siblings that are ready in one queue."""

    __slots__ = ("entries", "key", "size")

    def __init__(self, key: PrefixGroupKey) -> None:
        self.key = key
        self.size = 0
        self.entries: deque[QueuedJob] = deque()


class PrefixGroups:
    """The siblings in one queue, by what they have in common. Jobs without a prefix have none and cost nothing."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[PrefixGroupKey, PrefixGroup] = {}

    def add(self, entry: QueuedJob) -> None:
        job = entry.job
        key = (job.tenant, job.template_id or job.run_id, job.prefix[0])
        prefix_group = self._groups.get(key)
        if prefix_group is None:
            prefix_group = self._groups[key] = PrefixGroup(key)
        entry.prefix_group = prefix_group
        prefix_group.entries.append(entry)
        prefix_group.size += 1

    def remove(self, entry: QueuedJob, prefix_group: PrefixGroup) -> None:
        entry.prefix_group = None
        prefix_group.size -= 1
        if not prefix_group.size:
            del self._groups[prefix_group.key]


def ready_siblings(prefix_group: PrefixGroup) -> Iterator[QueuedJob]:
    """Siblings that are still ready, first come first, for as long as the caller takes what it gets."""
    entries = prefix_group.entries
    while entries:
        candidate = entries[0]
        if candidate.state is READY:
            yield candidate
            if candidate.state is READY:
                return
        entries.popleft()
