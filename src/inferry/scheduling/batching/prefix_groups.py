"""Siblings that are ready at the same time go to one worker in one plan.

The first of them computes the prefix, the others find it cached. A plan takes one quantum of their prompt tokens at
most: that is how long other jobs may have to wait for it.
"""

from collections.abc import Iterator

from inferry.scheduling.batching.prefix_key import PrefixKey, prefix_key
from inferry.scheduling.queues.queued_job import READY, PrefixGroup, QueuedJob


class PrefixGroups:
    """The prefix groups of one queue. Jobs without a prefix are in none and cost nothing."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[PrefixKey, PrefixGroup] = {}

    def add(self, entry: QueuedJob) -> None:
        key = prefix_key(entry.job)
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
    """Siblings that are still ready, in order of arrival, until the caller leaves one where it is."""
    entries = prefix_group.entries
    while entries:
        candidate = entries[0]
        if candidate.state is READY:
            yield candidate
            if candidate.state is READY:
                return
        entries.popleft()
