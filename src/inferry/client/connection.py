"""Requests to one gateway, with the retries that it asks for."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from inferry.client.completions import Call, Completion, completion_of, decoded, group_of
from inferry.client.errors import CallError, error_of, retry_wait_s
from inferry.client.http import HttpClient, Response


class GatewayConnection:
    """Belongs to one event loop. `retries` is the usual number of retries of a call."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        retries: int,
        max_retry_wait_s: float,
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.retries = retries
        self._max_retry_wait_s = max_retry_wait_s
        self._http = HttpClient(self.url, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
        self._auth = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    async def complete(self, call: Call, retries: int | None) -> Completion:
        async with await self.send(call, retries) as response:
            return completion_of(await response.read(), response.headers, call.step)

    async def complete_group(self, call: Call, count: int) -> list[Completion]:
        """The answers of a call with `count` prompts. Not retried."""
        async with await self.send(call, 0) as response:
            return group_of(await response.read(), response.headers, call.step, count)

    async def send(self, call: Call, retries: int | None) -> Response:
        """The response of an accepted call. Raises a CallError. `retries` None is no limit.

        A refused call is sent again only if the gateway says that this helps, and when it says.
        """
        retried = 0
        while True:
            response = await self._http.send("POST", call.path, {**self._auth, **call.headers}, call.body)
            if response.status < 400:
                return response
            error = await _error(response)
            wait_s = retry_wait_s(error, self._max_retry_wait_s)
            if wait_s is None or retried == retries:
                raise error
            retried += 1
            await asyncio.sleep(wait_s)

    async def request(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The decoded answer of any JSON endpoint. Not retried."""
        raw = b"" if body is None else msgspec.json.encode(body)
        fields = {**self._auth, **({} if body is None else {"content-type": "application/json"}), **(headers or {})}
        async with await self._http.send(method, path, fields, raw) as response:
            if response.status >= 400:
                raise await _error(response)
            return decoded(await response.read())

    def close(self) -> None:
        self._http.close()


async def _error(response: Response) -> CallError:
    async with response:
        return error_of(response.status, response.headers, decoded(await response.read()))
