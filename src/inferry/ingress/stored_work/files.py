"""`/v1/files…`: the files of the caller's tenant. A file of another tenant is reported as unknown."""

from typing import Any
from urllib.parse import quote, unquote

from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest, NotFound
from inferry.domain.storage import StoredFile
from inferry.durable.files import Files
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.router import Fail, Refuse, Router
from inferry.ingress.stored_work.download import send_stream
from inferry.ingress.stored_work.multipart import boundary_of
from inferry.ingress.stored_work.queries import is_newest_first, limit_of, parse_query
from inferry.ingress.stored_work.upload import UploadSink

MAX_LISTED = 10_000


class FilesRouter(Router):
    prefix = "/v1/files"
    paths = (
        *("POST /v1/files", "GET /v1/files", "GET /v1/files/{id}", "GET /v1/files/{id}/content"),
        "DELETE /v1/files/{id}",
    )

    def __init__(self, refuse: Refuse, fail: Fail, files: Files) -> None:
        super().__init__(refuse, fail)
        self._files = files

    def body_sink(self, request: Request, caller: Caller) -> UploadSink | None:
        if request.method != b"POST" or request.target.partition(b"?")[0] != self.prefix.encode():
            return None
        self._files.require_enabled()
        return UploadSink(self._files, caller.tenant.name, boundary_of(request.headers.get(b"content-type", b"")))

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        self._files.require_enabled()
        tenant, method = caller.tenant.name, request.method
        is_get = method in (b"GET", b"HEAD")
        id, _, rest = path.removeprefix(self.prefix).removeprefix("/").partition("/")
        id = unquote(id)
        if not id and method == b"POST":
            parse_query(query)
            sink = request.sink
            if not isinstance(sink, UploadSink):
                raise InvalidRequest("the body must be multipart/form-data with a `file`")
            self.respond_later(_create(sink), request, reply)
        elif not id:
            if not is_get:
                raise WrongMethod(self.prefix, "GET, HEAD, POST")
            self.respond_later(self._list(tenant, query), request, reply)
        elif rest == "content":
            if not is_get:
                raise WrongMethod(f"{self.prefix}/{{id}}/content", "GET, HEAD")
            self.respond_later(self._send_content(tenant, id, reply), request, reply)
        elif rest:
            raise NotFound("unknown path")
        elif method == b"DELETE":
            self.respond_later(self._delete(tenant, id), request, reply)
        elif is_get:
            self.respond_later(self._show(tenant, id), request, reply)
        else:
            raise WrongMethod(f"{self.prefix}/{{id}}", "GET, HEAD, DELETE")

    async def _list(self, tenant: str, query: str) -> dict[str, Any]:
        given = parse_query(query, "purpose", "limit", "order", "after")
        page = await self._files.list(
            tenant,
            purpose=given.get("purpose"),
            after=given.get("after"),
            limit=limit_of(given, MAX_LISTED, MAX_LISTED),
            newest_first=is_newest_first(given),
        )
        data = [file_object(file) for file in page.rows]
        return {"object": "list", "data": data, **first_and_last(data), "has_more": page.has_more}

    async def _show(self, tenant: str, id: str) -> dict[str, Any]:
        return file_object(await self._find(tenant, id))

    async def _delete(self, tenant: str, id: str) -> dict[str, Any]:
        if not await self._files.delete(tenant, id):
            raise _unknown()
        return {"id": id, "object": "file", "deleted": True}

    async def _send_content(self, tenant: str, id: str, reply: Reply) -> None:
        file = await self._find(tenant, id)
        name = quote(file.filename)
        headers = b"content-type: application/octet-stream\r\ncontent-disposition: attachment; filename*=UTF-8''%b\r\n"
        await send_stream(reply, headers % name.encode(), self._files.chunks(file))

    async def _find(self, tenant: str, id: str) -> StoredFile:
        file = await self._files.get(tenant, id)
        if file is None:
            raise _unknown()
        return file


async def _create(sink: UploadSink) -> dict[str, Any]:
    return file_object(await sink.stored())


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def first_and_last(data: list[dict[str, Any]]) -> dict[str, Any]:
    """The ids that clients page with."""
    return {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}


def _unknown() -> NotFound:
    return NotFound("no such file", param="id")
