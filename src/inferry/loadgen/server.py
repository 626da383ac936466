"""The probed server: its models, version and metrics, connections to it, and its errors."""

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Struct

from inferry.workers.http_client import Client, Connection, Request

CONNECT_TIMEOUT_S = 5.0
QUESTION_TIMEOUT_S = 20.0
CACHE = "vllm:cache_config_info"


class ProbeError(Exception):
    """The engine cannot be probed; the message says why."""


class Unreachable(ProbeError):
    """The server does not answer."""


class NotAllowed(ProbeError):
    """The key is missing or refused."""


class NoSuchModel(ProbeError):
    """The server does not serve that model."""


class NotStreaming(ProbeError):
    """The server does not stream tokens."""


class Refused(ProbeError):
    """The server refused a request or closed the connection."""

    def __init__(self, message: str, status: int = 0, *, was_stale: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.was_stale = was_stale


class Server:
    """Client of one OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self.url = redacted_url(url)
        self._http = Client(_without_v1(url), headers, CONNECT_TIMEOUT_S)
        self._has_metrics = True

    def close(self) -> None:
        self._http.close()

    async def models(self) -> dict[str, int | None]:
        """The served models, with their context lengths if known."""
        status, body = await self.get("/v1/models")
        if status in (401, 403):
            raise NotAllowed(f"{self.url} answered {status}: name the variable that holds its key with --api-key-env")
        if status != 200:
            raise Refused(f"GET {self.url}/v1/models answered {status}: {error_message(body)}", status)
        try:
            listed = msgspec.json.decode(body, type=_ModelList)
        except msgspec.MsgspecError:
            raise Refused(
                f"{self.url}/v1/models is not a list of models: is this an OpenAI-compatible server?"
            ) from None
        return {model.id: model.max_model_len for model in listed.data}

    async def version(self) -> str | None:
        """The server's version, if it reports one."""
        status, body = await self.get("/version")
        if status != 200:
            return None
        try:
            version = msgspec.json.decode(body, type=dict[str, Any]).get("version")
        except msgspec.MsgspecError:
            return None
        return version if isinstance(version, str) else None

    async def metrics(self) -> dict[str, float]:
        """Samples of its metrics, summed over labels; those of `cache_config_info` as `cache_config_info/<label>`."""
        if not self._has_metrics:
            return {}
        status, body = await self.get("/metrics")
        found = read_metrics(body.decode(errors="replace")) if status == 200 else {}
        self._has_metrics = bool(found)
        return found

    async def get(self, path: str) -> tuple[int, bytes]:
        answer = _Answer()
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                connection = await self._connection()
                try:
                    connection.start(answer, self._http.request(b"GET", path.encode(), b""))
                    return await answer.complete
                except (TimeoutError, asyncio.CancelledError):
                    connection.close()
                    raise
        except TimeoutError:
            raise Unreachable(f"{self.url} did not answer in time") from None
        except OSError as error:
            raise Unreachable(f"cannot reach {self.url}: {error.strerror or error or type(error).__name__}") from None

    async def connections(self, count: int) -> list[Connection]:
        """Open this many connections in advance."""
        try:
            return list(await asyncio.gather(*[self._connection() for _ in range(count)]))
        except TimeoutError:
            raise Unreachable(f"{self.url} accepts no more connections") from None
        except OSError as error:
            raise Unreachable(f"cannot reach {self.url}: {error.strerror or error or type(error).__name__}") from None

    def request(self, body: dict[str, Any]) -> Request:
        return self._http.request(b"POST", b"/v1/completions", b"", msgspec.json.encode(body))

    async def _connection(self) -> Connection:
        return self._http.free() or await self._http.connect()


class _Answer:
    """A complete answer."""

    def __init__(self) -> None:
        self.complete: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts: list[bytes] = []

    def on_head(self, status: int) -> None:
        self._status = status

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_end(self) -> None:
        if not self.complete.done():
            self.complete.set_result((self._status, b"".join(self._parts)))

    def on_lost(self, cause: str) -> None:
        if not self.complete.done():
            self.complete.set_exception(ConnectionError(cause))


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(Struct):
    data: list[_Model]


class _ErrorDetail(Struct):
    message: str = ""


class _ErrorBody(Struct):
    error: _ErrorDetail | str = ""
    message: str = ""
    detail: str = ""


# -- what is read ------------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_metrics(text: str) -> dict[str, float]:
    """Samples of the engine by name, summed over labels, without buckets and creation times."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match[1].startswith("vllm:") or match[1].endswith(("_bucket", "_created")):
            continue
        name, labels = match[1], match[2] or ""
        if name == CACHE:
            for label, value in _LABEL.findall(labels):
                if value.isdigit():
                    found[f"{CACHE}/{label}"] = float(value)
            continue
        try:
            found[name] = found.get(name, 0.0) + float(match[3])
        except ValueError:
            continue
    return found


def redacted_url(url: str) -> str:
    """The URL without user, password and query, for output."""
    parts = urlsplit(_without_v1(url))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")


def _without_v1(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def error_message(body: bytes) -> str:
    """The first line of a refusal's message."""
    try:
        details = msgspec.json.decode(body, type=_ErrorBody)
    except msgspec.MsgspecError:
        return body[:200].decode(errors="replace").strip()
    message = details.error if isinstance(details.error, str) else details.error.message
    return (message or details.message or details.detail).split("\n")[0][:300]
