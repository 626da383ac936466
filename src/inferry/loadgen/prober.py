"""Probes of an engine over HTTP, with the time of every event.

Everything belongs to one event loop. A probe opens its connections and writes its requests in advance, so that only the
engine and its server are timed. Times are taken where bytes arrive; events are parsed only as far as needed. Prompts
are random, so that no cache hides their cost.
"""

import asyncio
import gc
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct

from inferry.domain.streams import FinishReason
from inferry.domain.values import replace
from inferry.loadgen.probes import INJECTED_OUTPUT, SETTLED_TOKENS, Probe
from inferry.loadgen.server import (
    NoSuchModel,
    NotAllowed,
    NotStreaming,
    ProbeError,
    Refused,
    Server,
    Unreachable,
    error_message,
)
from inferry.sim.observations import CallTiming, Observation
from inferry.workers.http_client import Connection, Request
from inferry.workers.openai_http.sse import EventScanner

TRIAL_TIMEOUT_S = 60.0
TRIAL_PROMPT_TOKENS = 64
TRIAL_OUTPUT_TOKENS = 16
_MAX_ERROR_BODY_BYTES = 4096
# Ids that every vocabulary has and that are not special tokens; long prompts of them are still unique.
_IDS = (100, 1000)
_WORDS = ("north", "sand", "lamp", "river", "cold", "seven", "paper", "glass", "moon", "table", "apple", "wind")


class RequestForm(Struct, frozen=True):
    """The form of requests that this server accepts."""

    ids: bool = True
    includes_usage: bool = True
    end: Literal["ignore_eos", "min_tokens", ""] = "ignore_eos"
    words_per_token: float = 1.0

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self.end, "stream_options" if self.includes_usage else "") if name)


REQUEST_FORMS = tuple(
    RequestForm(ids, includes_usage, end)
    for ids in (True, False)
    for includes_usage in (True, False)
    for end in ("ignore_eos", "min_tokens", "")
)


class Prober:
    """Runs probes against one model of a server, in the form that the server accepts."""

    def __init__(
        self, server: Server, model: str, form: RequestForm = REQUEST_FORMS[0], seed: int | None = None
    ) -> None:
        self.form = form
        self._server = server
        self._model = model
        self._rng = random.Random(seed)

    async def negotiate(self) -> None:
        """Find the form of request that the server accepts, and check that it streams."""
        refusal: Refused | None = None
        for form in REQUEST_FORMS:
            self.form = form
            try:
                timing, finish = await self._trial()
            except Refused as error:
                if error.status not in (400, 422):
                    raise _explain(error, self._server.url, self._model) from None
                refusal = refusal or error
                continue
            if len(set(timing.heard_s)) == 1 and timing.output_tokens > 2:
                raise NotStreaming(f"{self._server.url} sends all {timing.output_tokens} tokens at once")
            if form.end and finish is FinishReason.STOP and timing.output_tokens < TRIAL_OUTPUT_TOKENS:
                refusal = refusal or Refused("the server ends answers before max_tokens although it was told not to")
                continue
            if not form.ids:
                self.form = replace(form, words_per_token=TRIAL_PROMPT_TOKENS / max(1, timing.prompt_tokens))
            return
        assert refusal is not None
        raise refusal

    async def _trial(self) -> tuple[CallTiming, FinishReason | None]:
        call = self._call(self._prompt(TRIAL_PROMPT_TOKENS), TRIAL_OUTPUT_TOKENS)
        (connection,) = await self._server.connections(1)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(TRIAL_TIMEOUT_S):
                call.send(connection)
                await call.finished
        except TimeoutError:
            raise Unreachable(f"{self._server.url} did not answer a short request in {TRIAL_TIMEOUT_S:g} s") from None
        finally:
            call.drop()
        return call.timing(began), call.finish

    async def run(self, probe: Probe) -> Observation:
        """Run one probe; again if an idle connection had been closed."""
        try:
            return await self._run(probe)
        except Refused as error:
            if not error.was_stale:
                raise
            self._server.close()
            return await self._run(probe)

    async def _run(self, probe: Probe) -> Observation:
        calls: list[_Call] = []
        before = await self._server.metrics()
        gc.collect()
        gc.disable()
        cpu, began = time.process_time(), time.perf_counter()
        try:
            match probe.kind:
                case "hit":
                    prompt = self._prompt(probe.prompt_tokens)
                    for _ in range(3):
                        await self._send_together([self._call(prompt, probe.output_tokens, prefix=0)], calls)
                case "inject":
                    await self._inject(probe, calls)
                case _:
                    base_calls = [
                        self._call(self._prompt(probe.prompt_tokens), probe.output_tokens)
                        for _ in range(probe.sequences)
                    ]
                    cpu, began = time.process_time(), time.perf_counter()
                    await self._send_together(base_calls, calls)
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        finally:
            gc.enable()
            for call in calls:
                call.drop()
        after = await self._server.metrics()
        return Observation(
            kind=probe.kind,
            held_out=probe.held_out,
            calls=tuple(call.timing(began) for call in calls),
            engine={
                name: after[name] - before[name] for name in after if name in before and after[name] != before[name]
            },
            client_busy=round(cpu_s / wall_s, 3),
        )

    async def _send_together(self, base_calls: Sequence["_Call"], calls: list["_Call"]) -> None:
        """Send all requests at once and wait until all have ended."""
        connections = await self._server.connections(len(base_calls))
        calls += base_calls
        for call, connection in zip(base_calls, connections, strict=True):
            call.send(connection)
        await _wait_all(base_calls)

    async def _inject(self, probe: Probe, calls: list["_Call"]) -> None:
        base_calls = [
            self._call(self._prompt(probe.prompt_tokens), probe.output_tokens) for _ in range(probe.sequences)
        ]
        injected = [self._call(self._prompt(tokens), INJECTED_OUTPUT) for tokens in probe.injected]
        *connections, idle_connection = await self._server.connections(len(base_calls) + 1)
        calls += base_calls
        for call, connection in zip(base_calls, connections, strict=True):
            call.send(connection)
        reached = SETTLED_TOKENS
        for call in injected:
            if not await _wait_for_tokens(base_calls, reached):
                break
            # At a random time within a step, as real requests arrive.
            await asyncio.sleep(self._rng.random() * _last_itl_s(base_calls))
            calls.append(call)
            call.send(idle_connection)
            await _wait_all([call])
            reached = min(one.tokens for one in base_calls) + SETTLED_TOKENS
            (idle_connection,) = await self._server.connections(1)
        await _wait_all(base_calls)

    def _call(self, prompt: list[int] | str, output_tokens: int, prefix: int | None = None) -> "_Call":
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.form.includes_usage:
            body["stream_options"] = {"include_usage": True}
        if self.form.end == "ignore_eos":
            body["ignore_eos"] = True
        elif self.form.end == "min_tokens":
            body["min_tokens"] = output_tokens
        prompt_tokens_field = (
            len(prompt) if isinstance(prompt, list) else round(len(prompt.split()) / self.form.words_per_token)
        )
        return _Call(self._server.request(body), prompt_tokens_field, prefix)

    def _prompt(self, tokens: int) -> list[int] | str:
        if self.form.ids:
            return self._rng.choices(range(*_IDS), k=tokens)
        return " ".join(self._rng.choices(_WORDS, k=max(1, round(tokens * self.form.words_per_token))))


class _Call:
    """A streamed call in progress; `finished` when it has ended in any way."""

    __slots__ = (
        "_connection",
        "_ended",
        "_pending",
        "_prefix",
        "_request",
        "_requested_prompt_tokens",
        "_scanner",
        "_sent",
        "_status",
        "_token_times",
        "finished",
        "tokens",
    )

    def __init__(self, request: Request, prompt_tokens: int, prefix: int | None) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokens = 0
        self._request = request
        self._requested_prompt_tokens = prompt_tokens
        self._prefix = prefix
        self._scanner = EventScanner()
        self._connection: Connection | None = None
        self._status = 0
        self._pending = b""
        self._sent = 0.0
        self._ended = 0.0
        self._token_times: list[float] = []

    @property
    def is_finished(self) -> bool:
        return self.finished.done()

    @property
    def finish(self) -> FinishReason | None:
        return self._scanner.finish

    @property
    def token_times(self) -> Sequence[float]:
        return self._token_times

    def send(self, connection: Connection) -> None:
        self._connection = connection
        self._sent = time.perf_counter()
        connection.start(self, self._request)

    def drop(self) -> None:
        if not self.finished.done():
            self.finished.cancel()
            if self._connection is not None:
                self._connection.close()

    def timing(self, began: float) -> CallTiming:
        usage = self._scanner.usage
        # A token without text may arrive in the event that ends the answer.
        token_times = self._token_times or [self._ended]
        return CallTiming(
            sent_s=round(self._sent - began, 6),
            heard_s=tuple([round(at - began, 6) for at in token_times]),
            ended_s=round(self._ended - began, 6),
            prompt_tokens=(usage.prompt_tokens if usage is not None else 0) or self._requested_prompt_tokens,
            output_tokens=max(usage.output_tokens if usage is not None else 0, len(token_times)),
            prefix=self._prefix,
            cached_tokens=usage.cached_tokens if usage is not None and usage.cached_tokens else None,
        )

    # Callbacks of the connection.

    def on_head(self, status: int) -> None:
        self._status = status

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        chunk = self._pending + body if self._pending else body
        if self._status != 200:
            self._pending = chunk[:_MAX_ERROR_BODY_BYTES]
            return
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        end = chunk.rfind(b"\n\n") + 2
        if end == 1:
            self._pending = chunk
            return
        self._pending = chunk[end:]
        scanner = self._scanner
        _, tokens = scanner.scan(chunk[:end])
        if tokens:
            self.tokens += tokens
            self._token_times.append(now)
            if tokens > 1:
                self._token_times += [now] * (tokens - 1)
        if not self._ended and scanner.finish is not None:
            self._ended = now

    def on_end(self) -> None:
        scanner = self._scanner
        if self._status != 200:
            self._fail(Refused(f"the server answered {self._status}: {error_message(self._pending)}", self._status))
        elif scanner.error is not None:
            self._fail(Refused("the server reported an error inside a stream"))
        elif not scanner.events:
            self._fail(
                NotStreaming("the server did not answer with server-sent events although it was asked to stream")
            )
        elif scanner.finish is None:
            self._fail(Refused("the server ended a stream before the answer was complete"))
        elif not self._token_times and not (scanner.usage is not None and scanner.usage.output_tokens):
            self._fail(Refused("the server ended a stream without a single token"))
        elif not self.finished.done():
            self.finished.set_result(None)

    def on_lost(self, cause: str) -> None:
        connection = self._connection
        stale = connection is not None and connection.was_used and not self._status
        self._fail(Refused(f"the server broke off: {cause}", was_stale=stale))

    def _fail(self, error: ProbeError) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


def _explain(error: Refused, url: str, model: str) -> ProbeError:
    """The error for a refused first request."""
    if error.status in (401, 403):
        return NotAllowed(f"{url} answered {error.status}: name the variable that holds its key with --api-key-env")
    if error.status == 404:
        return NoSuchModel(f"{url} does not complete with {model!r}: {error}")
    return error


# -- waiting -----------------------------------------------------------------------------------------------------------


async def _wait_all(calls: Iterable[_Call]) -> None:
    await asyncio.gather(*[call.finished for call in calls])


async def _wait_for_tokens(base_calls: Sequence[_Call], tokens: int) -> bool:
    """Wait until all calls have this many tokens. False: one has ended before."""
    while not any(call.is_finished for call in base_calls):
        if all(call.tokens >= tokens for call in base_calls):
            return True
        await asyncio.sleep(0.001)  # tokens are timed when they arrive, not when this wakes up
    return False


def _last_itl_s(base_calls: Sequence[_Call]) -> float:
    """The latest inter-token latency of the first decoding call."""
    token_times = base_calls[0].token_times
    return token_times[-1] - token_times[-2] if len(token_times) > 1 else 0.0
