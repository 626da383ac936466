"""The owner's side of the link: jobs of ingress processes, run by the owner's own gateway.

A job that arrives is submitted to the gateway like a call of the owner's own HTTP server, and its stream is read by the
connection. Deltas that become ready in one turn of the event loop leave in one frame. While an ingress process reads
slowly, deltas wait in their streams, where they are merged. A connection that is lost cancels its jobs.
"""

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from inferry.cluster import handshake
from inferry.cluster.frames import (
    MAX_FRAME_BYTES,
    Cancel,
    Cancelled,
    Challenge,
    EndRun,
    FrameError,
    Hello,
    Message,
    Piece,
    Placed,
    RateLimitFields,
    RequestsServed,
    Restart,
    Submit,
    TenantsChanged,
)
from inferry.cluster.job_fields import (
    done_to_message,
    failed_to_message,
    fields_to_job,
    limits_to_fields,
    resume_to_fields,
)
from inferry.cluster.link import LinkEnd
from inferry.cluster.owner import Owner
from inferry.dispatch.gateway import Gateway, JobStream
from inferry.domain.callers import Caller
from inferry.domain.errors import ClientClosed, GatewayError, IngressLost, InternalError, RunNotFound
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, End, Failed
from inferry.domain.tenants import Tenant
from inferry.domain.values import replace

log = logging.getLogger(__name__)

CATALOG_INTERVAL_S = 0.25
"""Interval at which a change of the workers is looked for."""
CLOSE_TIMEOUT_S = 1.0
"""Time for peers to read what was written before the end, in seconds."""
MAX_UNREAD_BYTES = 8 * 1024 * 1024
"""Unread bytes of one job after which it is cancelled: its ingress process does not read."""

MAX_GREETING_BYTES = 4096
"""Longest frame of a peer that has not proved itself."""
MAX_UNPROVEN = 1024
"""Connections of peers that have not proved themselves; a further one is closed."""


class OwnerServer:
    """Listens for ingress processes. `epoch` is that of the ownership."""

    def __init__(self, gateway: Gateway, owner: Owner, *, epoch: int = 0, secret: bytes | None = None) -> None:
        self.gateway = gateway
        self.owner = owner
        self.epoch = epoch
        self.secret = secret
        self.connections: set[OwnerConnection] = set()
        self.unproven: set[OwnerConnection] = set()
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.AbstractServer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._all_lost = asyncio.Event()
        self.last_catalog = owner.catalog()

    @property
    def jobs(self) -> int:
        """Jobs of ingress processes that have not ended."""
        return sum(len(connection.jobs) for connection in self.connections)

    async def listen_unix(self, path: Path) -> None:
        """Listen on a Unix socket that only this user can use. A socket that is left of a dead owner is replaced."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        mask = os.umask(0o177)
        try:
            self._listener = await self._loop.create_unix_server(self._accept, str(path))
        finally:
            os.umask(mask)
        self._watch_catalog()

    async def listen_tcp(self, host: str, port: int) -> int:
        """Listen for other hosts; returns the port. Needs a secret."""
        if self.secret is None:
            raise ValueError("gateways on other hosts need a secret")
        # Any, because the list of uvloop is not the tuple of asyncio, which compiled code checks.
        listener: Any = await self._loop.create_server(self._accept, host, port)
        self._listener = listener
        self._watch_catalog()
        return int(listener.sockets[0].getsockname()[1])

    def tenants_changed(self) -> None:
        """Ingress processes read tenants and keys again."""
        for connection in self.connections:
            connection.send(TenantsChanged())

    async def wait_until_left(self) -> None:
        """Return once no ingress process is connected."""
        while self.connections:
            self._all_lost.clear()
            await self._all_lost.wait()

    async def close(self) -> None:
        """Stop listening and close every connection. Jobs that have not ended are cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            self._all_lost.clear()
            self._loop.call_later(CLOSE_TIMEOUT_S, self._abort)
            await self._all_lost.wait()

    def _abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def connection_lost(self, connection: "OwnerConnection") -> None:
        self.unproven.discard(connection)
        self.connections.discard(connection)
        if not self.connections:
            self._all_lost.set()

    def _accept(self) -> "OwnerConnection":
        return OwnerConnection(self, self._loop)

    def _watch_catalog(self) -> None:
        catalog = self.owner.catalog()
        if catalog != self.last_catalog:
            self.last_catalog = catalog
            for connection in self.connections:
                connection.send(catalog)
        self._timer = self._loop.call_later(CATALOG_INTERVAL_S, self._watch_catalog)


class OwnedJob:
    """A job of an ingress process, and how much of its stream was sent."""

    __slots__ = ("_attempt", "_connection", "_is_placed", "_restarts", "caller", "is_marked", "job", "key", "stream")

    def __init__(
        self, connection: "OwnerConnection", key: int, job: InferenceJob, stream: JobStream, caller: Caller
    ) -> None:
        self._connection = connection
        self.key = key
        self.job = job
        self.stream = stream
        self.caller = caller
        self.is_marked = False
        self._attempt = stream.attempt
        self._restarts = stream.restarts
        self._is_placed = False

    def on_news(self) -> None:
        """Called by the stream for every delta and for the end."""
        connection = self._connection
        if not self.is_marked:
            self.is_marked = True
            connection.marked.append(self)
            connection.request_flush()
        elif connection.is_paused and self.stream.unread_bytes > MAX_UNREAD_BYTES:
            connection.cut_off(self)

    def send_news(self) -> None:
        """Send what the stream has."""
        connection, stream, key = self._connection, self.stream, self.key
        self.is_marked = False
        delta, end = stream.take_nowait()
        attempt = stream.attempt
        if attempt is not self._attempt:
            self._attempt = attempt
            point = attempt.job.resume_point
            fields = None if point is None else resume_to_fields(point)
            connection.send(Restart(key, attempt.job.attempt, fields))
            if delta is not None and delta.tokens > (new := attempt.output_tokens):
                # Tokens of earlier attempts that were not read yet: the resume point has them.
                ids = delta.token_ids
                delta = replace(delta, tokens=new, token_ids=ids[max(0, len(ids) - new) :])
        if delta is not None:
            if not self._is_placed:
                self._is_placed = True
                self._send_placement()
            raw = delta.raw
            is_last = isinstance(end, Done)
            piece = Piece(key, delta.tokens, raw, delta.text, delta.token_ids, is_last)
            connection.send(piece, len(raw) + len(delta.text))
        if end is not None:
            connection.ended(self, end)

    def _send_placement(self) -> None:
        attempt, stream = self.stream.attempt, self.stream
        plan, sent_at = attempt.plan, attempt.sent_at
        self._connection.send(
            Placed(
                self.key,
                "" if plan is None else plan.worker,
                0.0 if sent_at is None else max(0.0, sent_at - self.job.arrived_at),
                0 if plan is None else len(plan.jobs),
                stream.shared_with,
                stream.is_replay,
                self._connection.rate_limits(self.caller),
            )
        )


class OwnerConnection(LinkEnd):
    """The connection of one ingress process."""

    def __init__(self, server: OwnerServer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.max_frame_bytes = MAX_GREETING_BYTES
        self._server = server
        self._gateway = server.gateway
        self._challenge: Challenge | None = handshake.challenge()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenizing: dict[int, asyncio.Task[None]] = {}
        self.jobs: dict[int, OwnedJob] = {}
        self.marked: list[OwnedJob] = []

    # -- the connection ----------------------------------------------------------------------------------------------

    def on_opened(self) -> None:
        assert self._challenge is not None
        if len(self._server.unproven) >= MAX_UNPROVEN:
            log.error("a connection was closed: %d peers have not proved themselves yet", MAX_UNPROVEN)
            self.abort()
            return
        self._server.unproven.add(self)
        self.send(self._challenge)
        self._loop.call_later(handshake.TIMEOUT_S, self._expire)

    def on_lost(self) -> None:
        self._server.connection_lost(self)
        self.marked.clear()
        for task in self._tokenizing.values():
            task.cancel()
        jobs, self.jobs = self.jobs, {}
        for owned in jobs.values():
            owned.stream.listen(_ignore)
            self._gateway.cancel(owned.job.job_id, IngressLost("the ingress process of the call disconnected"))

    def collect(self) -> None:
        marked, self.marked = self.marked, []
        for owned in marked:
            owned.send_news()

    def on_message(self, message: Message) -> None:
        if self._challenge is not None:
            self._greet(message)
        elif isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            task = self._loop.create_task(self._cancel(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, RequestsServed):
            for path, status, number in message.counts:
                self._server.owner.count_requests(path, status, number)
        elif isinstance(message, EndRun):
            with contextlib.suppress(RunNotFound):
                self._gateway.finish_run(message.tenant, message.run_id)
        else:
            raise FrameError(f"an ingress process sent {type(message).__name__}")

    def _greet(self, message: Message) -> None:
        given, server = self._challenge, self._server
        if given is None or not isinstance(message, Hello):
            raise FrameError("a peer did not begin with its greeting")
        self.send(handshake.welcome(server.secret, given, message, server.epoch))
        self._challenge = None
        self.max_frame_bytes = MAX_FRAME_BYTES
        server.unproven.discard(self)
        if message.purpose == "http":
            transport, unread = self.detach()
            server.owner.serve_http(transport, unread, message.peer)
            return
        server.connections.add(self)
        self.send(server.last_catalog)

    def _expire(self) -> None:
        if self._challenge is not None:
            self.abort()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _submit(self, message: Submit) -> None:
        job = fields_to_job(message.job, self._gateway.now())
        if not self._server.owner.lacks_tokens(job):
            self._begin(message, job)
            return
        task = self._tokenizing[message.key] = self._loop.create_task(self._tokenize(message, job))
        task.add_done_callback(lambda _: self._tokenizing.pop(message.key, None))

    async def _tokenize(self, message: Submit, job: InferenceJob) -> None:
        try:
            job = await self._server.owner.tokenized(job)
        except GatewayError as error:
            self.send(failed_to_message(message.key, Failed(job.job_id, error), None))
        except Exception:
            self._send_internal_error(message.key, job)
        else:
            del self._tokenizing[message.key]  # a cancel finds the job from here on
            self._begin(message, job)

    def _begin(self, message: Submit, job: InferenceJob) -> None:
        key, owner = message.key, self._server.owner
        job = self._with_free_id(job)
        caller: Caller | None = None
        try:
            caller = Caller(Tenant(name=job.tenant)) if message.is_admitted else owner.caller(job.tenant, job.key_id)
            if message.is_admitted:
                job = replace(job, is_recorded=False)  # the process that has admitted it records it
            if message.job.trace is not None:
                owner.trace(job, message.job.trace)
            stream = self._gateway.submit(job, caller)
        except GatewayError as error:
            limits = None if caller is None else self.rate_limits(caller)
            self.send(failed_to_message(key, Failed(job.job_id, error), limits))
            return
        except Exception:
            self._send_internal_error(key, job)
            return
        owned = self.jobs[key] = OwnedJob(self, key, job, stream, caller)
        stream.listen(owned.on_news)

    def _send_internal_error(self, key: int, job: InferenceJob) -> None:
        """Logs the exception that is being handled."""
        log.exception("a job of an ingress process failed")
        refusal = InternalError("the gateway failed to handle the request")
        self.send(failed_to_message(key, Failed(job.job_id, refusal), None))

    def _with_free_id(self, job: InferenceJob) -> InferenceJob:
        """The job, with an id of its own while an earlier attempt has not ended here.

        An ingress process that has reconnected offers its jobs again, and workers confirm their cancels later.
        """
        job_id, number = job.job_id, 1
        while self._gateway.is_in_flight(job_id):
            number += 1
            job_id = f"{job.job_id}.{number}"
        return job if number == 1 else replace(job, job_id=job_id)

    def ended(self, owned: OwnedJob, end: End) -> None:
        """The job has ended: its last output was sent before."""
        self.jobs.pop(owned.key, None)
        if isinstance(end, Done):
            self.send(done_to_message(owned.key, end, is_streamed=owned.job.stream), len(end.raw))
        else:
            self.send(failed_to_message(owned.key, end, self.rate_limits(owned.caller)))

    def cut_off(self, owned: OwnedJob) -> None:
        """Cancel a job whose output is not read."""
        self._gateway.cancel(owned.job.job_id, ClientClosed(f"more than {MAX_UNREAD_BYTES} bytes were left unread"))

    def rate_limits(self, caller: Caller) -> RateLimitFields | None:
        status = self._gateway.rate_limit_status(caller)
        return None if status is None else limits_to_fields(status)

    async def _cancel(self, message: Cancel) -> None:
        confirmed: list[int] = []
        pending: list[tuple[OwnedJob, asyncio.Future[frozenset[str]]]] = []
        for key in message.keys:
            if (tokenizing := self._tokenizing.get(key)) is not None:
                tokenizing.cancel()
                confirmed.append(key)
                continue
            owned = self.jobs.get(key)
            if owned is None:
                continue
            cancel = self._gateway.cancel(owned.job.job_id)
            if cancel is None:
                confirmed.append(key)
            else:
                pending.append((owned, cancel.confirmed))
        for owned, confirmation in pending:
            if owned.job.job_id in await confirmation:
                confirmed.append(owned.key)
        self.send(Cancelled(message.call, confirmed))


def _ignore() -> None:
    """The listener of a stream whose ingress process is gone."""
