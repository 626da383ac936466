"""An uploaded file on its way from the connection to storage.

Belongs to one event loop. The connection feeds the body; one task parses it and writes the file, chunk by chunk. While
more than BUFFER_BYTES wait, the sink is full and the connection reads nothing.
"""

import asyncio
import logging
from collections import deque

from inferry.domain.errors import GatewayError, InternalError, InvalidRequest
from inferry.domain.storage import StoredFile
from inferry.durable.files import Files, Upload
from inferry.ingress.http.body_sink import BodySink
from inferry.ingress.stored_work.multipart import MultipartParser, Part

log = logging.getLogger(__name__)

BUFFER_BYTES = 1024 * 1024
MAX_FIELD_BYTES = 1024
FORM_OVERHEAD_BYTES = 64 * 1024
"""Fields, part headers and boundaries beside the file."""
MAX_FILENAME_CHARS = 255
PURPOSES = ("batch", "user_data")
MIN_TTL_S, MAX_TTL_S = 3600, 30 * 86_400
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_INCOMPLETE = "the multipart body is incomplete"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


class UploadSink(BodySink):
    """Writes the part `file` of a form; `stored` gives the file once the body is complete."""

    def __init__(self, files: Files, tenant: str, boundary: bytes) -> None:
        super().__init__(files.limits.max_file_bytes + FORM_OVERHEAD_BYTES)
        self._files = files
        self._tenant = tenant
        self._parser = MultipartParser(boundary)
        self._waiting: deque[bytes] = deque()
        self._buffered = 0
        self._has_ended = False
        self._wake = asyncio.Event()
        self._upload: Upload | None = None
        self._fields: dict[str, bytearray] = {}
        self._filename = ""
        self._current: str | None = None
        self._task = asyncio.get_running_loop().create_task(self._consume())

    def feed(self, data: bytes) -> None:
        self._waiting.append(data)
        self._buffered += len(data)
        self.is_full = self._buffered > BUFFER_BYTES
        self._wake.set()

    def end(self) -> None:
        self._has_ended = True
        self._wake.set()

    def abort(self) -> None:
        if not self._task.done():
            self._task.cancel()

    async def stored(self) -> StoredFile:
        """Make the file visible. Raises what is wrong with the form."""
        await self._task
        if self.problem is not None:
            raise self.problem
        if self._upload is None:
            is_complete = self._parser.is_complete
            raise InvalidRequest("the form has no `file`" if is_complete else _INCOMPLETE, param="file")
        try:
            if not self._parser.is_complete:
                raise InvalidRequest(_INCOMPLETE)
            fields = {name: bytes(value).decode("utf-8", "replace") for name, value in self._fields.items()}
            purpose = fields.get("purpose")
            if purpose not in PURPOSES:
                raise InvalidRequest(f"`purpose` must be one of {', '.join(PURPOSES)}", param="purpose")
            ttl_s = _ttl_s(fields, self._files.limits.file_ttl_s)
        except GatewayError:
            await self._upload.discard()
            raise
        return await self._upload.finish(purpose=purpose, filename=self._filename, ttl_s=ttl_s)

    async def _consume(self) -> None:
        try:
            while not (self._has_ended and not self._waiting):
                if not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                data = self._waiting.popleft()
                for found in self._parser.feed(data):
                    await self._take(found)
                self._buffered -= len(data)
                if self.is_full and self._buffered <= BUFFER_BYTES // 2:
                    self.is_full = False
                    self._notify()
        except asyncio.CancelledError:
            await self._discard()
            raise
        except GatewayError as error:
            await self._fail(error)
        except Exception:
            log.exception("an upload failed")
            await self._fail(InternalError("the gateway failed to store the file"))

    async def _take(self, found: Part | bytes) -> None:
        if isinstance(found, Part):
            self._current = found.name
            if found.name == "file":
                if self._upload is not None:
                    raise InvalidRequest("the form has more than one `file`", param="file")
                self._filename = _printable(found.filename or "file")
                self._upload = await self._files.begin_upload(self._tenant)
            elif found.name not in _FIELDS:
                raise InvalidRequest(f"unknown form field; supported are file, {', '.join(_FIELDS)}")
            else:
                self._fields[found.name] = bytearray()
        elif self._current == "file" and self._upload is not None:
            await self._upload.write(found)
        elif self._current is not None:
            field = self._fields[self._current]
            field += found
            if len(field) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"`{self._current}` is too long", param=self._current)

    async def _fail(self, error: GatewayError) -> None:
        error.__traceback__ = None  # its frames refer to data of the body
        self.problem = error
        self._waiting.clear()
        await self._discard()
        self._notify()

    async def _discard(self) -> None:
        if self._upload is not None:
            await asyncio.shield(self._upload.discard())

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change()


def _ttl_s(fields: dict[str, str], default_s: float | None) -> float | None:
    """Seconds until the file expires, from `expires_after` or the configuration."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise InvalidRequest(f"`{_ANCHOR}` must be created_at", param=_ANCHOR)
    if seconds is None or not (seconds.isascii() and seconds.isdigit()) or not MIN_TTL_S <= int(seconds) <= MAX_TTL_S:
        raise InvalidRequest(f"`{_SECONDS}` must be between {MIN_TTL_S} and {MAX_TTL_S}", param=_SECONDS)
    return float(seconds)


def _printable(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)[:MAX_FILENAME_CHARS]
