"""The load that probes an engine over HTTP, with the time of every event.

Everything belongs to one event loop. A probe makes its connections and writes its requests beforehand, so that what is
timed is the engine and its server; times are taken where bytes arrive, and events are looked at only as closely as
needed. Prompts are random, so that no cache hides what they cost.
"""

import asyncio
import gc
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct

from inferry.adapters.workers.http1 import Connection, Request
from inferry.adapters.workers.sse import EventScanner
from inferry.bench.probes import INJECTED_OUTPUT, SETTLED_TOKENS, Probe
from inferry.bench.target import NoSuchModel, NotAllowed, NotAStream, ProbeError, Refused, Server, Unreachable, said
from inferry.domain.streams import FinishReason
from inferry.domain.values import replace
from inferry.sim.observations import CallTiming, Observation

TRIAL_TIMEOUT_S = 60.0
TRIAL_PROMPT = 64
TRIAL_TOKENS = 16
_LONGEST_REFUSAL = 4096
# Ids that any vocabulary has and that are no special tokens; few enough, and long prompts of them are still unique.
_IDS = (100, 1000)
_WORDS = ("north", "sand", "lamp", "river", "cold", "seven", "paper", "glass", "moon", "table", "apple", "wind")


class Form(Struct, frozen=True):
    """What a request of this server may look like."""

    ids: bool = True
    counts: bool = True
    end: Literal["ignore_eos", "min_tokens", ""] = "ignore_eos"
    words_per_token: float = 1.0

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self.end, "stream_options" if self.counts else "") if name)


FORMS = tuple(
    Form(ids, counts, end)
    for ids in (True, False)
    for counts in (True, False)
    for end in ("ignore_eos", "min_tokens", "")
)


class Prober:
    """Runs probes against one model of a server, in the form the server takes."""

    def __init__(self, server: Server, model: str, form: Form = FORMS[0], seed: int | None = None) -> None:
        self.form = form
        self._server = server
        self._model = model
        self._draw = random.Random(seed)

    async def negotiate(self) -> None:
        """Find the form of request the server takes, and that it streams."""
        refusal: Refused | None = None
        for form in FORMS:
            self.form = form
            try:
                timing, finish = await self._trial()
            except Refused as error:
                if error.status not in (400, 422):
                    raise _plainer(error, self._server.url, self._model) from None
                refusal = refusal or error
                continue
            if len(set(timing.heard_s)) == 1 and timing.output_tokens > 2:
                raise NotAStream(f"{self._server.url} sends all {timing.output_tokens} tokens at once")
            if form.end and finish is FinishReason.STOP and timing.output_tokens < TRIAL_TOKENS:
                refusal = refusal or Refused("the server ends answers before max_tokens although it was told not to")
                continue
            if not form.ids:
                self.form = replace(form, words_per_token=TRIAL_PROMPT / max(1, timing.prompt_tokens))
            return
        assert refusal is not None
        raise refusal

    async def _trial(self) -> tuple[CallTiming, FinishReason | None]:
        call = self._call(self._prompt(TRIAL_PROMPT), TRIAL_TOKENS)
        (connection,) = await self._server.connections(1)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(TRIAL_TIMEOUT_S):
                call.send(connection)
                await call.over
        except TimeoutError:
            raise Unreachable(f"{self._server.url} did not answer a short request in {TRIAL_TIMEOUT_S:g} s") from None
        finally:
            call.drop()
        return call.timing(began), call.finish

    async def run(self, probe: Probe) -> Observation:
        """One probe; a connection that had died of old age is no reason to lose it."""
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
                        await self._at_once([self._call(prompt, probe.output_tokens, prefix=0)], calls)
                case "inject":
                    await self._inject(probe, calls)
                case _:
                    crowd = [
                        self._call(self._prompt(probe.prompt_tokens), probe.output_tokens)
                        for _ in range(probe.sequences)
                    ]
                    cpu, began = time.process_time(), time.perf_counter()
                    await self._at_once(crowd, calls)
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

    async def _at_once(self, crowd: Sequence["_Call"], calls: list["_Call"]) -> None:
        """Send all of them in one go and wait until all are over."""
        connections = await self._server.connections(len(crowd))
        calls += crowd
        for call, connection in zip(crowd, connections, strict=True):
            call.send(connection)
        await _all_over(crowd)

    async def _inject(self, probe: Probe, calls: list["_Call"]) -> None:
        crowd = [self._call(self._prompt(probe.prompt_tokens), probe.output_tokens) for _ in range(probe.sequences)]
        injected = [self._call(self._prompt(tokens), INJECTED_OUTPUT) for tokens in probe.injected]
        *connections, spare = await self._server.connections(len(crowd) + 1)
        calls += crowd
        for call, connection in zip(crowd, connections, strict=True):
            call.send(connection)
        settled = SETTLED_TOKENS
        for call in injected:
            if not await _settled(crowd, settled):
                break
            # Anywhere within a step, as requests come in life.
            await asyncio.sleep(self._draw.random() * _gap_s(crowd))
            calls.append(call)
            call.send(spare)
            await _all_over([call])
            settled = min(one.tokens for one in crowd) + SETTLED_TOKENS
            (spare,) = await self._server.connections(1)
        await _all_over(crowd)

    def _call(self, prompt: list[int] | str, output_tokens: int, prefix: int | None = None) -> "_Call":
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.form.counts:
            body["stream_options"] = {"include_usage": True}
        if self.form.end == "ignore_eos":
            body["ignore_eos"] = True
        elif self.form.end == "min_tokens":
            body["min_tokens"] = output_tokens
        told = len(prompt) if isinstance(prompt, list) else round(len(prompt.split()) / self.form.words_per_token)
        return _Call(self._server.request(body), told, prefix)

    def _prompt(self, tokens: int) -> list[int] | str:
        if self.form.ids:
            return self._draw.choices(range(*_IDS), k=tokens)
        return " ".join(self._draw.choices(_WORDS, k=max(1, round(tokens * self.form.words_per_token))))


class _Call:
    """A streamed call under way; `over` when it has ended, one way or the other."""

    __slots__ = (
        "_connection",
        "_ended",
        "_heard",
        "_pending",
        "_prefix",
        "_request",
        "_scanner",
        "_sent",
        "_status",
        "_told_tokens",
        "over",
        "tokens",
    )

    def __init__(self, request: Request, prompt_tokens: int, prefix: int | None) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokens = 0
        self._request = request
        self._told_tokens = prompt_tokens
        self._prefix = prefix
        self._scanner = EventScanner()
        self._connection: Connection | None = None
        self._status = 0
        self._pending = b""
        self._sent = 0.0
        self._ended = 0.0
        self._heard: list[float] = []

    @property
    def is_over(self) -> bool:
        return self.over.done()

    @property
    def finish(self) -> FinishReason | None:
        return self._scanner.finish

    @property
    def heard(self) -> Sequence[float]:
        return self._heard

    def send(self, connection: Connection) -> None:
        self._connection = connection
        self._sent = time.perf_counter()
        connection.start(self, self._request)

    def drop(self) -> None:
        if not self.over.done():
            self.over.cancel()
            if self._connection is not None:
                self._connection.close()

    def timing(self, began: float) -> CallTiming:
        usage = self._scanner.usage
        # A token without text may come with nothing but the end of the answer.
        heard = self._heard or [self._ended]
        return CallTiming(
            sent_s=round(self._sent - began, 6),
            heard_s=tuple([round(at - began, 6) for at in heard]),
            ended_s=round(self._ended - began, 6),
            prompt_tokens=(usage.prompt_tokens if usage is not None else 0) or self._told_tokens,
            output_tokens=max(usage.output_tokens if usage is not None else 0, len(heard)),
            prefix=self._prefix,
            cached_tokens=usage.cached_tokens if usage is not None and usage.cached_tokens else None,
        )

    # What the connection tells.

    def on_head(self, status: int) -> None:
        self._status = status

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        chunk = self._pending + body if self._pending else body
        if self._status != 200:
            self._pending = chunk[:_LONGEST_REFUSAL]
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
            self._heard.append(now)
            if tokens > 1:
                self._heard += [now] * (tokens - 1)
        if not self._ended and scanner.finish is not None:
            self._ended = now

    def on_end(self) -> None:
        scanner = self._scanner
        if self._status != 200:
            self._fail(Refused(f"the server answered {self._status}: {said(self._pending)}", self._status))
        elif scanner.error is not None:
            self._fail(Refused("the server reported an error inside a stream"))
        elif not scanner.events:
            self._fail(NotAStream("the server did not answer with server-sent events although it was asked to stream"))
        elif scanner.finish is None:
            self._fail(Refused("the server ended a stream before the answer was complete"))
        elif not self._heard and not (scanner.usage is not None and scanner.usage.output_tokens):
            self._fail(Refused("the server ended a stream without a single token"))
        elif not self.over.done():
            self.over.set_result(None)

    def on_lost(self, why: str) -> None:
        connection = self._connection
        stale = connection is not None and connection.was_used and not self._status
        self._fail(Refused(f"the server broke off: {why}", was_stale=stale))

    def _fail(self, error: ProbeError) -> None:
        if not self.over.done():
            self.over.set_exception(error)


def _plainer(error: Refused, url: str, model: str) -> ProbeError:
    """What a refusal of the very first request means to the person who calibrates."""
    if error.status in (401, 403):
        return NotAllowed(f"{url} answered {error.status}: name the variable that holds its key with --api-key-env")
    if error.status == 404:
        return NoSuchModel(f"{url} does not complete with {model!r}: {error}")
    return error


# -- waiting -----------------------------------------------------------------------------------------------------------


async def _all_over(calls: Iterable[_Call]) -> None:
    await asyncio.gather(*[call.over for call in calls])


async def _settled(crowd: Sequence[_Call], tokens: int) -> bool:
    """Wait until all of them have so many tokens. False: one of them has ended before."""
    while not any(call.is_over for call in crowd):
        if all(call.tokens >= tokens for call in crowd):
            return True
        await asyncio.sleep(0.001)  # what is timed is when tokens arrive, not when this notices
    return False


def _gap_s(crowd: Sequence[_Call]) -> float:
    """How far the last two tokens of the crowd's first were apart."""
    heard = crowd[0].heard
    return heard[-1] - heard[-2] if len(heard) > 1 else 0.0
