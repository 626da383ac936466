"""One job on its way to an OpenAI-compatible server: reads the answer as it comes, until `end` says how it went.

All of it runs in callbacks of the connection, on the worker's event loop.
"""

import asyncio
from typing import Any, Protocol

from inferry.adapters.workers.bodies import asks_for_token_ids, is_never_continued, wants_one_choice
from inferry.adapters.workers.http1 import Connection, Request
from inferry.adapters.workers.sse import EventScanner, is_utf8
from inferry.adapters.workers.stops import StopSeam
from inferry.adapters.workers.trail import ContinuedScanner, FollowingScanner
from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, ContextLengthExceeded, GatewayError, WorkerLost
from inferry.domain.jobs import InferenceJob, SoFar
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Item, Usage
from inferry.domain.usage import most_output
from inferry.domain.values import replace

LONGEST_EVENT = 16 * 1024 * 1024
LONGEST_REFUSAL = 65_536
SLACK_EVENTS = 10_000
"""Events that say nothing, such as an engine's heartbeats, on top of those that do."""
SURELY_SEEN_S = 0.1
"""A call that was sent this long ago is part of what the engine says it does."""


class Server(Protocol):
    """What a call asks of the worker it belongs to."""

    clock: Clock

    @property
    def name(self) -> str: ...

    def send(self, call: "Call") -> None: ...

    def answered(self, call: "Call", status: int, limits: dict[bytes, bytes]) -> None: ...

    def refused(self, call: "Call", status: int, body: bytes, limits: dict[bytes, bytes]) -> GatewayError | None:
        """What a refusal means; None where the call was sent again instead."""

    def ended(self, call: "Call", end: Done | Failed) -> None: ...

    def heard(self) -> None:
        """The server has sent something that is no token: it is alive."""

    def shape_of(self, api: str) -> dict[str, Any] | None:
        """How it writes answers in one piece, where that is known."""


class Flight:
    """A plan on its way: `over` when every call of it has its end, or when the sink of their items broke."""

    __slots__ = ("_left", "over")

    def __init__(self, calls: int) -> None:
        self._left = calls
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def landed(self) -> None:
        self._left -= 1
        if not self._left and not self.over.done():
            self.over.set_result(None)

    def broke(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class Call:
    """A job from its beginning. Its events pass through as bytes."""

    __slots__ = (
        "_emit",
        "_flight",
        "_index",
        "_limits",
        "_most_tokens",
        "_now",
        "_pending",
        "_scan",
        "_scanner",
        "_status",
        "_worker",
        "connection",
        "end",
        "heard_at",
        "job",
        "key",
        "key_heard",
        "keys_tried",
        "sent_at",
    )

    def __init__(self, job: InferenceJob, emit: Emit, flight: Flight, worker: Server, *, follows: bool = False) -> None:
        self.job = job
        self.end: Done | Failed | None = None
        self.connection: Connection | None = None
        self.key: int | None = None
        self.key_heard = True
        self.keys_tried = 0
        self._emit = emit
        self._flight = flight
        self._worker = worker
        self._now = worker.clock.now
        self.heard_at = self.sent_at = self._now()
        self._scanner: EventScanner = self._make_scanner(follows)
        self._scan = self._scanner.scan
        self._status = 0
        self._limits: dict[bytes, bytes] = {}
        self._pending = b""
        self._index = 0
        limit = job.payload.output_limit
        limit = job.token_budget if limit is None else limit
        self._most_tokens = most_output(limit)

    def _make_scanner(self, follows: bool) -> EventScanner:
        if not follows:
            return EventScanner()
        payload = self.job.payload
        return FollowingScanner(passes_ids=asks_for_token_ids(payload.body), holds_text=bool(payload.sampling.stop))

    @property
    def has_tokens(self) -> bool:
        return self._scanner.tokens > 0

    @property
    def can_move(self) -> bool:
        """Whether another worker can do the job without its client noticing."""
        return not self.has_tokens or not self.job.stream or self._so_far() is not None

    @property
    def reports_cached(self) -> bool | None:
        """Whether the server says how much of a prompt it had cached; None where it reports no use at all."""
        return None if self._scanner.usage is None else self._scanner.reports_cached

    def is_surely_seen(self, now: float) -> bool:
        """Whether the engine counts the call among what it does."""
        return self._scanner.tokens > 0 or (self.connection is not None and now - self.sent_at >= SURELY_SEEN_S)

    def start(self, connection: Connection, request: Request) -> None:
        self.connection = connection
        self.heard_at = self.sent_at = self._now()
        connection.start(self, request)

    def again(self) -> None:
        """The call is about to be sent once more: nothing of the first answer counts."""
        self._status = 0
        self._pending = b""
        self._limits = {}

    def fail(self, error: GatewayError) -> None:
        """End the job, and only this job; its connection is dropped."""
        if self.end is None:
            self.drop()
            self._finish(Failed(self.job.job_id, error, self._usage(), self._so_far()))

    def part(self) -> Connection | None:
        """The connection, which from here on is the caller's."""
        connection, self.connection = self.connection, None
        return connection

    def give_up(self) -> None:
        """Nobody wants the job's end any more."""
        self.drop()
        self.end = Failed(self.job.job_id, ClientClosed("nobody waits for it"))

    def break_off(self, error: GatewayError) -> None:
        """The server says no more. That is an error, unless all but its closing words had come."""
        scanner = self._scanner
        if scanner.finish is not None and scanner.error is None and wants_one_choice(self.job.payload.body):
            self.drop()
            self._finish(self._done(scanner.finish))
        else:
            self.fail(error)

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    # What the connection tells.

    def on_head(self, status: int) -> None:
        self._status = status
        self.heard_at = self._now()
        connection = self.connection
        if connection is not None and connection.limits:
            self._limits = connection.limits
        if self.key is not None:
            self._worker.answered(self, status, self._limits)

    def on_body(self, body: bytes) -> None:
        written = self._scanner.tokens
        chunk = self._pending + body if self._pending else body
        if self._status != 200:
            self._pending = chunk[:LONGEST_REFUSAL]
            return
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        end = chunk.rfind(b"\n\n") + 2
        if end == 1:
            self._pending = chunk
            if len(chunk) > LONGEST_EVENT:
                self.fail(WorkerLost(f"worker {self._worker.name} sent an event without an end"))
            return
        self._pending = chunk[end:]
        events = chunk[:end]
        # Events end between characters, so those that are complete can be checked on their own.
        if not events.isascii() and not is_utf8(events):
            self.fail(WorkerLost(f"worker {self._worker.name} sent bytes that are not UTF-8"))
            return
        scanner = self._scanner
        raw, tokens = self._scan(events)
        if scanner.tokens != written:
            self.heard_at = self._now()
        else:
            self._worker.heard()  # comments, roles and pieces of events show that the server lives, not the job
        if raw:
            job = self.job
            self._tell(Delta(job.job_id, job.run_id, job.step_id, self._index, "", (), tokens, raw, scanner.is_done))
            self._index += 1
        if scanner.error is not None:
            # At once: what comes after it may look like a good end.
            self.fail(WorkerLost(f"worker {self._worker.name} reported an error in the stream"))
        elif scanner.is_done:
            connection = self.connection
            if connection is not None and not connection.is_over:
                # All has been said; whether the server also ends its answer is not for the job to wait for.
                connection.let_go()
                self.on_end()
        elif scanner.tokens > self._most_tokens or scanner.events > 2 * self._most_tokens + SLACK_EVENTS:
            self.fail(WorkerLost(f"worker {self._worker.name} wrote more than it was asked to"))

    def on_end(self) -> None:
        self.connection = None
        if self.end is not None:
            return  # whoever took the items has ended it meanwhile
        scanner = self._scanner
        if self._status != 200:
            error = self._worker.refused(self, self._status, self._pending, self._limits)
            if error is not None:
                self._refuse(error)
        elif scanner.error is not None:
            self.fail(WorkerLost(f"worker {self._worker.name} reported an error in the stream"))
        elif scanner.finish is None:
            self.fail(WorkerLost(f"worker {self._worker.name} ended the stream before the answer was complete"))
        else:
            self._finish(self._done(scanner.finish))

    def on_lost(self, why: str) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and connection.was_used and not self._status:
            # A kept connection that the server closed while the request was on its way: nobody has seen it.
            self._worker.send(self)
            return
        self.break_off(WorkerLost(f"worker {self._worker.name} broke off: {why}"))

    # What it tells.

    def _refuse(self, error: GatewayError) -> None:
        self.fail(error)

    def _finish(self, end: Done | Failed) -> None:
        self.end = end
        self._worker.ended(self, end)
        self._tell(end)
        self._flight.landed()

    def _tell(self, item: Item) -> None:
        try:
            self._emit(item)
        except Exception as error:
            # Not the connection's to hear: whoever runs the plan ends what is left of it.
            self._flight.broke(error)

    def _usage(self) -> Usage:
        return self._scanner.usage or Usage(output_tokens=self._scanner.tokens)

    def _done(self, finish: FinishReason) -> Done:
        scanner = self._scanner
        reason = scanner.stop_reason
        shape = self._worker.shape_of(self.job.payload.api)
        return Done(self.job.job_id, finish, self._usage(), scanner.usage_event, stop_reason=reason, shape=shape)

    def _so_far(self) -> SoFar | None:
        scanner = self._scanner
        if not isinstance(scanner, FollowingScanner | ContinuedScanner):
            return self.job.so_far
        return None if is_never_continued(self.job.payload.body) else scanner.so_far()


class ContinuedCall(Call):
    """A job that goes on where an earlier attempt broke off. Its deltas carry text and token ids, no events.

    `begins_whole`: that it begins with a whole character is known, or cannot be. `stops` are the stop strings that it
    is to look for, from where it goes on.
    """

    __slots__ = ("begins_whole", "stops")

    def __init__(self, job: InferenceJob, emit: Emit, flight: Flight, worker: Server) -> None:
        self.stops: StopSeam | None = None
        super().__init__(job, emit, flight, worker)
        self._scan = self._read
        self.begins_whole = False

    def begin_after(self, written: int, stops: StopSeam | None = None) -> None:
        """Begin after so many ids of what was written: those after them are half a character, and written again."""
        so_far = self.job.so_far
        assert so_far is not None
        self.begins_whole = True
        if written < len(so_far.output_ids):
            self.job = replace(self.job, so_far=replace(so_far, output_ids=so_far.output_ids[:written]))
        self.stops = stops
        self._scanner = self._make_scanner(follows=False)

    def _make_scanner(self, follows: bool) -> EventScanner:
        assert self.job.so_far is not None
        return ContinuedScanner(self.job.so_far, self.stops)

    def finish_at_once(self) -> None:
        """The job broke off after the last token it could have: only text that was held back is left of it."""
        rest = "" if self.stops is None else self.stops.finish()
        if rest:
            self._say(rest, (), 0)
        self._finish(self._done(FinishReason.LENGTH))

    def _read(self, events: bytes) -> tuple[bytes, int]:
        scanner = self._scanner
        assert isinstance(scanner, ContinuedScanner)
        text, ids = scanner.read(events)
        if text or ids:
            self._say(text, ids, len(ids) or 1)
        if scanner.is_stopped and self.end is None:
            # The engine was not told of stop strings and would go on: closing the connection ends it.
            self.drop()
            self._finish(self._done(FinishReason.STOP))
        return b"", 0

    def _say(self, text: str, ids: tuple[int, ...], tokens: int) -> None:
        job = self.job
        self._tell(Delta(job.job_id, job.run_id, job.step_id, self._index, text, ids, tokens))
        self._index += 1

    def _usage(self) -> Usage:
        so_far, scanner = self.job.so_far, self._scanner
        assert so_far is not None
        if scanner.usage is None and scanner.stop_reason is not None:
            return Usage(len(so_far.prompt_ids) + len(so_far.output_ids), 0, scanner.tokens)
        return super()._usage()

    def _refuse(self, error: GatewayError) -> None:
        if isinstance(error, ContextLengthExceeded):
            # Not the prompt is too long: what came of it has reached the end of the context.
            self.finish_at_once()
        else:
            self.fail(error)


class LastWords:
    """Listens to a stream whose job has ended, for the proof that the engine has let go of it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def on_head(self, status: int) -> None: ...

    def on_body(self, body: bytes) -> None:
        said = self._tail + body
        # Quotes inside strings are escaped: a model cannot write this, only an engine that is done.
        if b'"finish_reason":"' in said or b"\ndata: [DONE]" in said:
            self._is_over(True)
        self._tail = said[-32:]

    def on_end(self) -> None:
        self._is_over(True)

    def on_lost(self, why: str) -> None:
        self._is_over(False)

    def close(self) -> None:
        self.connection.close()
        self._is_over(False)

    def _is_over(self, proven: bool) -> None:
        if not self.over.done():
            self.over.set_result(proven)
