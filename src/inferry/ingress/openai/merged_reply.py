"""One response for the jobs of several prompts.

Every job has a response of its own, which writes into a `PromptReply`. The `MergedReply` behind them writes to the
client: events as they arrive, or one body at the end. The first prompt that fails ends the call, and the other jobs are
cancelled. A client that disconnects cancels all of them. Belongs to one event loop; nothing here waits.
"""

from collections.abc import Callable, Sequence
from typing import Final

from inferry.domain.errors import CallAborted, ClientClosed, GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.ingress.http.reply import Reply, ReplyChannel
from inferry.ingress.openai.merged_choices import MergedChoices
from inferry.ingress.openai.render import DONE_EVENT
from inferry.ingress.wire_format import COMMENT

_STOP_HEADER: Final = b"x-inferry-stop-reason:"

Cancel = Callable[[str, GatewayError | None], object]


class PromptReply(Reply):
    """Collects the response of one prompt."""

    __slots__ = ("_call", "_prompt")

    def __init__(self, call: "MergedReply", prompt: int, reply: Reply) -> None:
        super().__init__(ReplyChannel(), reply.request)
        self._call = call
        self._prompt = prompt

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.release()
        self._call.responded(self._prompt, status, headers, body)

    def begin(self, headers: bytes) -> None:
        self._call.begun(headers)

    def write(self, piece: bytes) -> None:
        self._call.written(self._prompt, piece)

    def end(self, piece: bytes) -> None:
        self.release()
        self._call.ended(self._prompt, piece)

    def abort(self) -> None:
        self.release()
        self._call.aborted(self._prompt)


class MergedReply:
    """The response of one call. Unread events wait here, up to `max_unread_bytes`; then the connection is reset."""

    def __init__(self, reply: Reply, jobs: Sequence[InferenceJob], cancel: Cancel, max_unread_bytes: int) -> None:
        first = jobs[0]
        self._reply = reply
        self._cancel = cancel
        self._max_unread_bytes = max_unread_bytes
        self._merged = MergedChoices(f"cmpl-{first.job_id}", first.payload.choices)
        self._streams = first.stream
        self._includes_usage = first.payload.include_usage
        self._open = {prompt: job.job_id for prompt, job in enumerate(jobs)}  # in the order of the prompts
        self._bodies: list[bytes] = [b""] * len(jobs)
        self._headers = b""
        self._has_begun = False
        self._is_over = False
        self._unread: list[bytes] = []
        self._unread_bytes = 0

    def start(self) -> list[PromptReply]:
        """A reply for each prompt, in order."""
        reply = self._reply
        reply.on_disconnect = self._on_disconnect
        if self._streams:
            reply.heartbeat = COMMENT
            reply.on_writable = self._flush
        return [PromptReply(self, prompt, reply) for prompt in self._open]

    # -- responses of prompts ----------------------------------------------------------------------------------------

    def responded(self, prompt: int, status: int, headers: bytes, body: bytes) -> None:
        """A prompt has its whole answer, or has failed before its first event."""
        self._open.pop(prompt, None)
        if self._is_over:
            return
        if status != 200:
            self._is_over = True
            if self._has_begun:
                self._reply.end(self._take_unread() + b"data: %b\n\n" % body)
            else:
                self._reply.respond(status, headers, body)
            self._cancel_open(CallAborted("another prompt of the call failed"))
            return
        self._bodies[prompt] = body
        if prompt == 0 or _STOP_HEADER in headers:
            self._headers = headers
        if not self._open:
            merged = self._merged.body(self._bodies)  # raises where a worker's answer is malformed
            self._is_over = True
            self._reply.respond(200, self._headers, merged)

    def begun(self, headers: bytes) -> None:
        if not self._has_begun and not self._is_over:
            self._has_begun = True
            self._reply.begin(headers)

    def written(self, prompt: int, piece: bytes) -> None:
        if self._is_over:
            return
        if piece != COMMENT:
            self._send(self._merged.events(prompt, piece))
        elif prompt == next(iter(self._open)):  # one heartbeat for all
            self._send(piece)

    def ended(self, prompt: int, piece: bytes) -> None:
        """The stream of a prompt is complete, or has failed: then its last event is an error."""
        if self._is_over:
            self._open.pop(prompt, None)
            return
        events = self._merged.events(prompt, piece)
        self._open.pop(prompt, None)
        if not piece.endswith(DONE_EVENT):
            self._is_over = True
            self._reply.end(self._take_unread() + events)
            self._cancel_open(CallAborted("another prompt of the call failed"))
        elif self._open:
            self._send(events)
        else:
            self._is_over = True
            usage = self._merged.usage_event() if self._includes_usage else b""
            self._reply.end(self._take_unread() + events + usage + DONE_EVENT)

    def aborted(self, prompt: int) -> None:
        self._open.pop(prompt, None)
        if not self._is_over:
            self._is_over = True
            self._reply.abort()
            self._cancel_open(CallAborted("another prompt of the call failed"))

    # -- the client --------------------------------------------------------------------------------------------------

    def _on_disconnect(self) -> None:
        self._is_over = True
        self._cancel_open(None)

    def _cancel_open(self, error: GatewayError | None) -> None:
        for job_id in list(self._open.values()):
            self._cancel(job_id, error)

    def _send(self, piece: bytes) -> None:
        if not self._reply.is_paused and not self._unread:
            self._reply.write(piece)
            return
        self._unread.append(piece)
        self._unread_bytes += len(piece)
        if self._unread_bytes > self._max_unread_bytes:
            self._is_over = True
            self._reply.on_disconnect = None
            self._reply.abort()
            self._cancel_open(ClientClosed(f"the client left more than {self._max_unread_bytes} bytes unread"))

    def _flush(self) -> None:
        if not self._is_over and self._unread:
            self._reply.write(self._take_unread())

    def _take_unread(self) -> bytes:
        unread = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        return unread
