"""Parents of runs that are not in memory: forgotten here, known from the ledger, or seen by another gateway."""

from collections import OrderedDict

from inferry.runs.run import RunKey


class ParentLinks:
    """The first parent of each run, by time; at most `max_links`, and none for longer than `keep_s`."""

    def __init__(self, max_links: int, keep_s: float) -> None:
        self._max_links = max_links
        self._keep_s = keep_s
        self._links: OrderedDict[RunKey, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def parent_of(self, key: RunKey) -> str | None:
        found = self._links.get(key)
        return None if found is None else found[0]

    def add(self, key: RunKey, parent_id: str, at: float) -> None:
        self._links[key] = (parent_id, at)
        if len(self._links) > self._max_links:
            self._links.popitem(last=False)

    def remove(self, key: RunKey) -> None:
        self._links.pop(key, None)

    def expire(self, now: float) -> None:
        while self._links:
            key, (_, at) = next(iter(self._links.items()))
            if at + self._keep_s > now:
                return
            del self._links[key]
