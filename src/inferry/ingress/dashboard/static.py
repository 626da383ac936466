"""The files of the dashboard's page, read once and served from memory. They hold no data."""

import gzip
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from inferry.domain.errors import NotFound
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request

PREFIX = "/dashboard/"
PATHS = (f"GET {PREFIX}{{name}}",)
SECURITY_HEADERS = (
    b"content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"x-frame-options: DENY\r\nx-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\n"
    b"cross-origin-opener-policy: same-origin\r\ncross-origin-resource-policy: same-origin\r\n"
)
_INDEX = "index.html"
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "woff2": b"font/woff2",
}


class _File(NamedTuple):
    body: bytes
    compressed: bytes
    headers: bytes
    etag: bytes


class DashboardFiles:
    """Serves the files by name. Only names of existing files are served: a name is never a path."""

    def __init__(self, folder: Traversable | None = None) -> None:
        folder = folder or resources.files("inferry") / "observe" / "dashboard"
        self._files = {**_load_folder(folder, ""), **_load_folder(folder / "vendor", "vendor/")}

    def serve_index(self, reply: Reply) -> None:
        self.serve(_INDEX, reply)

    def serve(self, name: str, reply: Reply) -> None:
        """Answer with the file. Raises NotFound."""
        file = self._files.get(name)
        if file is None:
            raise NotFound("unknown file of the dashboard")
        given = reply.request.headers
        if file.etag in (one.strip() for one in given.get(b"if-none-match", b"").split(b",")):
            # A 304 announces the length of the file and has no content, as the response to a HEAD request.
            reply.request.method = b"HEAD"
            reply.respond(304, file.headers, file.body)
        elif _accepts_gzip(reply.request):
            reply.respond(200, file.headers + b"content-encoding: gzip\r\n", file.compressed)
        else:
            reply.respond(200, file.headers, file.body)


def wants_page(request: Request) -> bool:
    """Whether the client of `GET /` is a browser."""
    return b"text/html" in request.headers.get(b"accept", b"")


def _accepts_gzip(request: Request) -> bool:
    codings = [one.strip() for one in request.headers.get(b"accept-encoding", b"").split(b",")]
    return b"gzip" in codings


def _load_folder(folder: Traversable, prefix: str) -> dict[str, _File]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {prefix + one.name: _load(one) for one in files if one.name.rpartition(".")[2] in _TYPES and one.is_file()}


def _load(file: Traversable) -> _File:
    body = file.read_bytes()
    etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:24].encode()
    headers = b"content-type: %b\r\netag: %b\r\ncache-control: no-cache\r\nvary: accept, accept-encoding\r\n%b" % (
        _TYPES[file.name.rpartition(".")[2]],
        etag,
        SECURITY_HEADERS,
    )
    return _File(body, gzip.compress(body, mtime=0), headers, etag)
