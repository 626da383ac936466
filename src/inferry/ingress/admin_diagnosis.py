"""`GET /admin/diagnosis`: where latency comes from, and the one setting to try. `inferry doctor` and `top` show it."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from inferry.ingress.admin_endpoint import AdminEndpoint, Fail, Refuse, check_names, read_number
from inferry.observe.history import KEPT_S

PATH = "/admin/diagnosis"
PATHS = (f"GET {PATH}",)
MIN_WINDOW_S = 10.0
DEFAULT_WINDOW_S = 300.0

Diagnose = Callable[[float], Awaitable[Any]]
"""The diagnosis of the last seconds, as a JSON value."""


class AdminDiagnosis(AdminEndpoint):
    def __init__(self, refuse: Refuse, fail: Fail, diagnose: Diagnose) -> None:
        super().__init__(refuse, fail)
        self._diagnose = diagnose

    def owns(self, path: str) -> bool:
        return path == PATH

    def route(self, path: str, query: dict[str, str]) -> Coroutine[None, None, Any] | None:
        if path != PATH:
            return None
        check_names(query, "window_s")
        return self._answer_with(read_number(query, "window_s", MIN_WINDOW_S, KEPT_S) or DEFAULT_WINDOW_S)

    async def _answer_with(self, window_s: float) -> Any:
        return await self._diagnose(window_s)
