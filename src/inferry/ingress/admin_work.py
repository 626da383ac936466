"""`/admin/work` for pull-workers, with a key of their own, and `GET /admin/dead-letters` for operators."""

import asyncio
import hmac
from collections.abc import Coroutine
from typing import Any

import msgspec

from inferry.domain.errors import AdminOnly, NotFound
from inferry.durable.dead_letters import DeadLetters
from inferry.durable.pulled_work import Message, PulledWork
from inferry.ingress.admin_endpoint import AdminEndpoint, Fail, Refuse, check_names
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.decode import decode_body

WORK = "/admin/work"
DEAD_LETTERS = "/admin/dead-letters"
PATHS = (f"GET {DEAD_LETTERS}",)
"""Without WORK, which is between parts of one version."""
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Message)


class AdminWork(AdminEndpoint):
    """`pulled` and the `key` of pull-workers are None at a gateway without any."""

    def __init__(
        self, refuse: Refuse, fail: Fail, dead_letters: DeadLetters, pulled: PulledWork | None, key: bytes | None
    ) -> None:
        super().__init__(refuse, fail)
        self._key = key
        self._dead_letters = dead_letters
        self._pulled = pulled

    def accepts_key(self, request: Request) -> bool:
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        if self._key is None or request.target != WORK.encode() or scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given.strip(), self._key)

    def owns(self, path: str) -> bool:
        return path in (DEAD_LETTERS, WORK)

    def route(self, path: str, query: dict[str, str]) -> Coroutine[None, None, Any] | None:
        if path == WORK:
            raise WrongMethod(WORK, "POST")
        if path != DEAD_LETTERS:
            return None
        check_names(query)
        return self._list()

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        if path != WORK or request.method != b"POST":
            return super().serve(path, request, reply)
        if self._pulled is None:
            raise NotFound("this gateway has no pull-workers (cluster.pull_models)")
        if not self.accepts_key(request):
            raise AdminOnly(f"{WORK} needs the key of pull-workers, also from operators")
        message: Message = decode_body(_decoder, request.body)
        task = asyncio.get_running_loop().create_task(self._answer(self._pulled.answer(message), request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _list(self) -> dict[str, Any]:
        return {"dead_letters": await self._dead_letters.list()}
