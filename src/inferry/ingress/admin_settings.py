"""`/admin/settings`: versions of the settings, applied to the running gateway. `Admin` has authorized the request."""

from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from inferry.domain.settings_versions import NewSettings, SettingsComparison, SettingsHistory, SettingsState
from inferry.ingress.admin_endpoint import AdminEndpoint, Fail, Refuse, check_names
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.decode import decode_body

PATH = "/admin/settings"
ROLLBACK = f"{PATH}/rollback"
COMPARISON = f"{PATH}/comparison"
PATHS = (f"GET {PATH}", f"POST {PATH}", f"POST {ROLLBACK}", f"GET {COMPARISON}")


class RollbackBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, for the history."""

    reason: str = ""


_new_decoder = msgspec.json.Decoder(NewSettings)
_rollback_decoder = msgspec.json.Decoder(RollbackBody)


class Settings(Protocol):
    """The settings in use."""

    async def history(self) -> SettingsHistory: ...
    async def apply(self, new: NewSettings) -> SettingsState: ...
    async def rollback(self, reason: str = "") -> SettingsState: ...
    async def comparison(self) -> SettingsComparison: ...


class AdminSettings(AdminEndpoint):
    """The endpoints."""

    def __init__(self, refuse: Refuse, fail: Fail, settings: Settings) -> None:
        super().__init__(refuse, fail)
        self._settings = settings

    def owns(self, path: str) -> bool:
        return path in (PATH, COMPARISON)

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        if request.method != b"POST" or path not in (PATH, ROLLBACK):
            if path == ROLLBACK:
                raise WrongMethod(path, "POST")
            if path == PATH and request.method not in (b"GET", b"HEAD"):
                raise WrongMethod(path, "GET, HEAD, POST")
            return super().serve(path, request, reply)
        if request.problem is not None:
            raise request.problem
        if path == PATH:
            work = self._settings.apply(decode_body(_new_decoder, request.body))
        else:
            work = self._settings.rollback(decode_body(_rollback_decoder, request.body or b"{}").reason)
        self.answer_later(work, request, reply)
        return True

    def route(self, path: str, query: dict[str, str]) -> Coroutine[None, None, Any] | None:
        if path == PATH:
            check_names(query)
            return self._settings.history()
        if path == COMPARISON:
            check_names(query)
            return self._settings.comparison()
        return None
