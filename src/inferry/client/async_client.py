"""`AsyncClient` and `AsyncRun`."""

import asyncio
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from inferry.client.calls import AsyncCalls
from inferry.client.connection import GatewayConnection
from inferry.client.errors import BudgetExhausted, CallError, NotFound
from inferry.client.tools import Timer, ToolTimes

DEFAULT_URL = "http://127.0.0.1:8000"
CANCEL_TIMEOUT_S = 10.0
"""Longest wait for the answer to a cancellation when a scope is left by an exception."""


class AsyncClient(AsyncCalls):
    """A client of one gateway, for one event loop.

    `retries`: how often a refused call is sent again, only where the gateway asks for it and when it says, unless that
    is later than `max_retry_wait_s`. `timeout_s`: longest wait for the next bytes of a response.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retries: int = 2,
        max_retry_wait_s: float = 60.0,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
    ) -> None:
        connection = GatewayConnection(
            url,
            api_key=api_key,
            retries=retries,
            max_retry_wait_s=max_retry_wait_s,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
        )
        super().__init__(connection, headers or {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def run(self, id: str | None = None, **options: Any) -> "AsyncRun":
        """A run; `options` are those of `AsyncRun`. Without an id it gets a random one."""
        return AsyncRun(self._connection, self.headers, id, **options)

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer of any JSON endpoint of the gateway, such as `GET /v1/models`."""
        return await self._connection.request(method, path, body, self.headers)

    async def close(self) -> None:
        self._connection.close()


class AsyncRun(AsyncCalls):
    """A run and its scope: `async with client.run() as run`.

    Leaving the scope normally marks the run as finished; leaving it by an exception cancels the run with all its
    sub-runs. `token_budget` and `money_budget` are compared with what the run and its sub-runs have used, before each
    call of either. Calls in flight at that time are not counted; ceilings that hold exactly are those of the tenant.
    """

    def __init__(
        self,
        connection: GatewayConnection,
        headers: Mapping[str, str],
        id: str | None = None,
        *,
        parent: str | None = None,
        lane: str | None = None,
        token_budget: int | None = None,
        money_budget: float | None = None,
    ) -> None:
        self.id = id or f"run-{uuid.uuid4().hex}"
        self.parent = parent
        self.token_budget = token_budget
        self.money_budget = money_budget
        self.tools = ToolTimes()
        self.is_cancelled = False
        self._outer: AsyncRun | None = None
        named = {"run-id": self.id, "parent-run-id": parent, "lane": lane}
        super().__init__(
            connection, {**headers, **{f"x-inferry-{name}": text for name, text in named.items() if text is not None}}
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self.is_cancelled:
                await self.finish()
            elif kind is not None:
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await self.cancel()
        except (CallError, TimeoutError):
            # The exception that left the scope is the one to report. A run without calls is unknown to the gateway.
            pass

    def sub_run(self, id: str | None = None, **options: Any) -> "AsyncRun":
        """A run whose parent is this one. It is cancelled with it."""
        run = AsyncRun(self._connection, self.headers, id, parent=self.id, **options)
        run._outer = self
        return run

    def tool(self, name: str) -> Timer:
        """`with run.tool("search"):` adds the time of the block to `run.tools`."""
        return Timer(self.tools, name)

    async def status(self) -> dict[str, Any]:
        """The run as the gateway sees it: tokens, cost, waits, tool time, budget. Unknown before its first call."""
        found: dict[str, Any] = await self._connection.request("GET", self._path, headers=self.headers)
        return found

    async def cancel(self, wait_ms: int = 1000) -> dict[str, Any]:
        """Cancel the run with its sub-runs. The answer says what engines have confirmed as freed within `wait_ms`."""
        self.is_cancelled = True
        path = f"{self._path}?wait_ms={wait_ms}"
        found: dict[str, Any] = await self._connection.request("DELETE", path, headers=self.headers)
        return found

    async def finish(self) -> None:
        """End the tool time of the run, and tell the gateway about its tools. A later call reopens it."""
        tools = self.tools.report()
        body = {"tools": tools} if tools else None
        await self._connection.request("POST", f"{self._path}/finish", body, self.headers)

    async def prepare(self) -> None:
        if self._outer is not None:
            await self._outer.prepare()
        if self.token_budget is None and self.money_budget is None:
            return
        try:
            used = (await self._connection.request("GET", f"{self._path}?steps=0", headers=self.headers))["tree"]
        except NotFound:  # no call yet
            return
        tokens, cost = used["tokens"]["prompt"] + used["tokens"]["output"], used["cost"] or 0.0
        if self.token_budget is not None and tokens >= self.token_budget:
            raise BudgetExhausted(
                f"the run has used {tokens} of {self.token_budget} tokens", code="run_budget_exhausted"
            )
        if self.money_budget is not None and cost >= self.money_budget:
            raise BudgetExhausted(f"the run has spent {cost:g} of {self.money_budget:g}", code="run_budget_exhausted")

    def new_step(self) -> str:
        return uuid.uuid4().hex[:16]

    @property
    def _path(self) -> str:
        return f"/v1/runs/{quote(self.id, safe='')}"
