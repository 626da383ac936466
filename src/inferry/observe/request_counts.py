"""HTTP requests by endpoint and class of status."""

from collections.abc import Mapping
from typing import Final

from inferry.observe.counters import FastCounter

STATUS_CLASSES = ("2xx", "4xx", "5xx")
CLIENT_CLOSED: Final = 499
"""Status of a request whose client disconnected before the end of the response."""


class RequestCounts:
    """`endpoints` has the counters of each endpoint in the order of STATUS_CLASSES; `other` counts the rest."""

    def __init__(self, endpoints: Mapping[str, list[FastCounter]]) -> None:
        self._counters = {endpoint.encode(): counters for endpoint, counters in endpoints.items()}
        self._other = self._counters.get(b"other", [FastCounter() for _ in STATUS_CLASSES])

    def count(self, target: bytes, status: int) -> None:
        """Count a request by its target: an endpoint's path, or a path below one."""
        counters = self._counters.get(target)
        if counters is None:
            counters = self._endpoint_of(target)
        counters[0 if status < 400 else 1 if status < 500 else 2].value += 1

    def _endpoint_of(self, target: bytes) -> list[FastCounter]:
        path = target.partition(b"?")[0]
        while path:
            counters = self._counters.get(path)
            if counters is not None:
                return counters
            path = path.rpartition(b"/")[0]
        return self._other
