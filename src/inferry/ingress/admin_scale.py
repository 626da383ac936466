"""`GET /admin/scale`: how many workers each group should have. Autoscalers read it."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from inferry.ingress.admin_endpoint import AdminEndpoint, Fail, Refuse, check_names

PATH = "/admin/scale"
PATHS = (f"GET {PATH}",)


class AdminScale(AdminEndpoint):
    """`report` is the advice for every group."""

    def __init__(self, refuse: Refuse, fail: Fail, report: Callable[[], Sequence[Any]]) -> None:
        super().__init__(refuse, fail)
        self._report = report

    def owns(self, path: str) -> bool:
        return path == PATH

    def route(self, path: str, query: dict[str, str]) -> Coroutine[None, None, Any] | None:
        if path != PATH:
            return None
        check_names(query, "group")
        return self._answer_with(query.get("group"))

    async def _answer_with(self, group: str | None) -> Any:
        advice = self._report()
        return {"groups": [one for one in advice if group is None or one.group == group]}
