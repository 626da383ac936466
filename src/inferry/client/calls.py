"""Calls on asyncio: one answer, a streamed one, and many at once.

Cancelling a task closes the connection of its call, which cancels the call in the gateway.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from inferry.client.completions import (
    Call,
    Completion,
    CompletionBuilder,
    EventSplitter,
    Piece,
    Prompt,
    Result,
    call_of,
    group_call,
    is_text,
)
from inferry.client.connection import GatewayConnection
from inferry.client.errors import CallError, ConnectionFailed, InvalidCall, Overloaded
from inferry.client.http import Response

GROUP = 16
"""Prompts of `batch_complete` in one call."""


class AsyncCalls:
    """Calls with common headers: those of a client, or those of a run."""

    def __init__(self, connection: GatewayConnection, headers: Mapping[str, str]) -> None:
        self._connection = connection
        self.headers = dict(headers)

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def api_key(self) -> str | None:
        return self._connection.api_key

    async def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        step: str | None = None,
        lane: str | None = None,
        deadline_ms: int | None = None,
        **fields: Any,
    ) -> Completion:
        """One answer. `fields` are those of OpenAI's API: `max_tokens`, `temperature`, `tools`, …"""
        call = self._call(prompt, step, lane, deadline_ms, {"model": model, **fields})
        await self.prepare()
        return await self._connection.complete(call, self._connection.retries)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str,
        step: str | None = None,
        lane: str | None = None,
        deadline_ms: int | None = None,
        **fields: Any,
    ) -> "AsyncStream":
        """One answer, piece by piece. Use it with `async with`: leaving the block ends the call."""
        fields = {"model": model, **fields, "stream": True, "stream_options": {"include_usage": True}}
        return AsyncStream(self._connection, self._call(prompt, step, lane, deadline_ms, fields), self)

    async def concurrent_complete(
        self,
        prompts: Iterable[Prompt],
        *,
        model: str,
        concurrency: int = 16,
        step: str | None = None,
        lane: str | None = None,
        deadline_ms: int | None = None,
        **fields: Any,
    ) -> list[Result]:
        """One call for each prompt, at most `concurrency` at once. Results are in order; that of a failed call is its
        error. Steps are named `step-0`, `step-1`, …"""
        calls = self._calls(prompts, step, lane, deadline_ms, {"model": model, **fields})
        return await self._complete_all(calls, concurrency, self._connection.retries)

    async def batch_complete(
        self, prompts: Iterable[Prompt], *, model: str, concurrency: int = 64, step: str | None = None, **fields: Any
    ) -> list[Result]:
        """As `concurrent_complete`, in lane P2. Calls refused for lack of capacity are retried without limit.

        Texts and token ids without a `step` are sent several in one call, which costs client and gateway less. Such a
        call is one step, and its first result has the usage of all. If it is refused, its prompts are sent one by one.
        """
        prompts = list(prompts)
        fields = {"model": model, **fields}
        size = min(GROUP, concurrency // 2)
        if step is None and size > 1 and "n" not in fields and all(map(is_text, prompts)):
            return await self._complete_groups(prompts, size, concurrency // size, fields)
        return await self._complete_all(self._calls(prompts, step, "P2", None, fields), concurrency, None)

    async def prepare(self) -> None:
        """Awaited before each call. Raises a CallError to refuse the call."""

    def new_step(self) -> str | None:
        """The step of a call that names none."""
        return None

    def _calls(
        self,
        prompts: Iterable[Prompt],
        step: str | None,
        lane: str | None,
        deadline_ms: int | None,
        fields: dict[str, Any],
    ) -> list[Call]:
        return [
            self._call(prompt, None if step is None else f"{step}-{number}", lane, deadline_ms, fields)
            for number, prompt in enumerate(prompts)
        ]

    def _call(
        self, prompt: Prompt, step: str | None, lane: str | None, deadline_ms: int | None, fields: dict[str, Any]
    ) -> Call:
        step = step or self.new_step()
        return call_of(prompt, fields, self._headers(step, lane, deadline_ms), step)

    def _headers(self, step: str | None, lane: str | None, deadline_ms: int | None) -> dict[str, str]:
        named = {"step-id": step, "lane": lane, "deadline-ms": deadline_ms}
        given = {f"x-inferry-{name}": str(value) for name, value in named.items() if value is not None}
        return {**self.headers, **given}

    async def _complete_groups(
        self, prompts: list[Prompt], size: int, concurrency: int, fields: dict[str, Any]
    ) -> list[Result]:
        """`concurrency` calls at once, each with `size` prompts of one kind."""
        groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        results: list[list[Result]] = [[] for _ in groups]
        rest = iter(range(len(groups)))

        async def complete_rest() -> None:
            for number in rest:
                results[number] = await self._complete_group(groups[number], fields)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(groups))):
                tasks.create_task(complete_rest())
        return [result for group in results for result in group]

    async def _complete_group(self, prompts: list[Prompt], fields: dict[str, Any]) -> list[Result]:
        if len(prompts) > 1 and len({isinstance(prompt, str) for prompt in prompts}) == 1:
            step = self.new_step()
            call = group_call(prompts, fields, self._headers(step, "P2", None), step)
            try:
                await self.prepare()
                return [*await self._connection.complete_group(call, len(prompts))]
            except (InvalidCall, Overloaded):
                # A limit may be smaller than the group, and one prompt may be invalid: each gets its own answer.
                pass
            except CallError as error:
                return [error] * len(prompts)
        return await self._complete_all(self._calls(prompts, None, "P2", None, fields), len(prompts), None)

    async def _complete_all(self, calls: list[Call], concurrency: int, retries: int | None) -> list[Result]:
        if concurrency < 1:
            raise ValueError("`concurrency` must be at least 1")
        results: dict[int, Result] = {}
        rest = iter(enumerate(calls))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(calls))):
                tasks.create_task(self._complete_rest(rest, results, retries))
        return [results[number] for number in range(len(calls))]

    async def _complete_rest(
        self, rest: Iterator[tuple[int, Call]], results: dict[int, Result], retries: int | None
    ) -> None:
        for number, call in rest:
            try:
                await self.prepare()
                results[number] = await self._connection.complete(call, retries)
            except CallError as error:
                results[number] = error


class AsyncStream:
    """A streamed answer. The call is sent with the first piece that is read."""

    def __init__(self, connection: GatewayConnection, call: Call, calls: AsyncCalls) -> None:
        self._connection = connection
        self._call = call
        self._calls = calls
        self._response: Response | None = None
        self._builder = CompletionBuilder()
        self._splitter = EventSplitter()
        self._pieces: deque[Piece] = deque()
        self._has_ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._has_ended:
                raise StopAsyncIteration
            await self._receive()
        return self._pieces.popleft()

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended."""
        if self._response is None or not self._builder.is_complete:
            raise RuntimeError("the stream has not ended")
        return self._builder.completion(self._response.headers, self._call.step)

    async def close(self) -> None:
        """Close the connection, unless the stream has ended."""
        self._has_ended = True
        if self._response is not None:
            self._response.close()

    async def _receive(self) -> None:
        if self._response is None:
            await self._calls.prepare()
            self._response = await self._connection.send(self._call, self._connection.retries)
        response = self._response
        try:
            data = await response.read_some()
            for event in self._splitter.feed(data):
                piece = self._builder.add(event, response.headers)
                if piece is not None:
                    self._pieces.append(piece)
        except BaseException:
            await self.close()
            raise
        if not data:
            self._has_ended = True
            if not self._builder.is_complete:
                raise ConnectionFailed("the stream was cut", request_id=response.headers.get("x-request-id"))
