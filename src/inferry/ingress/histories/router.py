"""`/v1/histories/{id}`: the originals of summarised conversations."""

from typing import Any

import msgspec

from inferry.domain.callers import Caller
from inferry.domain.errors import NotFound
from inferry.durable.documents import Documents
from inferry.ingress.histories.summaries import KIND, StoredHistory, Summaries
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.router import Fail, Refuse, Router
from inferry.ingress.stored_work.method_dispatch import begin


class HistoriesRouter(Router):
    """`GET /v1/histories/{id}`: the original of a summarised conversation. Another tenant's is unknown."""

    prefix = "/v1/histories"
    paths = ("GET /v1/histories/{id}", "DELETE /v1/histories/{id}")

    def __init__(self, refuse: Refuse, fail: Fail, documents: Documents, summaries: Summaries) -> None:
        super().__init__(refuse, fail)
        self._documents = documents
        self._summaries = summaries

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        async def read(id: str) -> dict[str, Any]:
            stored = await self._documents.get(caller.tenant.name, KIND, id)
            if stored is None:
                raise NotFound("unknown history")
            history = msgspec.json.decode(stored.content, type=StoredHistory)
            return {
                "id": id,
                "object": "history",
                "created_at": int(stored.created_at),
                "expires_at": None if stored.expires_at is None else int(stored.expires_at),
                "model": history.model,
                "summary": history.summary,
                "messages": history.messages,
            }

        async def delete(id: str) -> dict[str, Any]:
            if not await self._documents.delete(caller.tenant.name, KIND, id):
                raise NotFound("unknown history")
            self._summaries.forget(id)
            return {"id": id, "object": "history.deleted", "deleted": True}

        self.respond_later(
            begin(self.prefix, path, request.method, {"{id}": {"GET": read, "DELETE": delete}}), request, reply
        )

    async def close(self) -> None:
        await self._summaries.close()
        await super().close()
