"""The HTTP server's life: listen, serve, drain, close."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator

from inferry.dispatch.gateway import Gateway
from inferry.domain.errors import Draining
from inferry.domain.workers import Phase
from inferry.ingress.app import App
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.request import Request
from inferry.ingress.http.server import Server
from inferry.observe.request_counts import RequestCounts

log = logging.getLogger(__name__)

ABANDON_GRACE_S = 2.0
"""After the drain timeout: time for the last responses to reach clients."""
BACKLOG = 4096
POLL_INTERVAL_S = 0.02
RETRY_AFTER_S = 2.0
SETTLING_S = 5.0
KEEP_ALIVE_GRACE_S = 0.25
"""While draining: how long an idle connection stays open for a request that is on its way, longer than a round trip."""
SWITCH_INTERVAL_S = 0.0005
"""A thread in Python delays the event loop by at most this, each time that the loop wakes up; by default 5 ms."""
LISTENERS = 16
"""Listeners on one socket: connections accepted per iteration of the event loop."""


def raise_file_limit() -> None:
    """Raise the limit of open files to the machine's maximum: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tune_interpreter() -> None:
    """Exempt the objects that exist now from garbage collection, and collect less often: calls create few cycles.

    Threads that write rows or compute reports leave the interpreter to the event loop sooner.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class StopSignals:
    """The first SIGTERM or SIGINT starts a drain, the second ends it. SIGHUP drains for a successor.

    `is_succeeded`: another process will accept on the socket, so that connections wait for it instead of being refused.
    `may_upgrade` is awaited before SIGHUP has an effect; without it the signal is not handled.
    """

    def __init__(
        self, *, is_succeeded: bool = False, may_upgrade: Callable[[], Coroutine[None, None, bool]] | None = None
    ) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()
        self.is_succeeded = is_succeeded
        self.is_upgrade = False
        self._may_upgrade = may_upgrade
        self._checking: asyncio.Task[None] | None = None

    def request(self) -> None:
        self.is_upgrade = False
        (self.force if self.drain.is_set() else self.drain).set()

    def request_upgrade(self) -> None:
        if self._checking is None and not self.drain.is_set():
            self._checking = asyncio.get_running_loop().create_task(self._upgrade())

    async def _upgrade(self) -> None:
        assert self._may_upgrade is not None
        try:
            if await self._may_upgrade() and not self.drain.is_set():
                self.is_succeeded = self.is_upgrade = True
                self.drain.set()
        finally:
            self._checking = None

    @contextlib.contextmanager
    def installed(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.request, signal.SIGINT: self.request}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        if self._may_upgrade is not None:
            # A handler of the loop would end with the loop, and SIGHUP would then end the process that is replaced.
            signal.signal(signal.SIGHUP, lambda *_: self._hangup(loop))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            yield
        finally:
            if self.is_upgrade:
                # The mask outlives exec: a signal waits until the next process image can handle it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            elif self._may_upgrade is not None:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
            for number in handlers:
                loop.remove_signal_handler(number)

    def _hangup(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.request_upgrade)


@contextlib.contextmanager
def stop_at_eof(stop: StopSignals, lifeline: int | None) -> Generator[None, None, None]:
    """Drain when the other end of this pipe is closed: the process that started this one is gone."""
    if lifeline is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def closed() -> None:
        loop.remove_reader(lifeline)
        if not stop.drain.is_set():
            stop.request()

    loop.add_reader(lifeline, closed)
    try:
        yield
    finally:
        loop.remove_reader(lifeline)


async def wait_for_workers(gateway: Gateway, stop: StopSignals, timeout_s: float) -> None:
    """Wait until the workers are up, so that calls that wait in the queue of an inherited socket find their models.

    Once one worker is up, the others have SETTLING_S seconds more.
    """
    left_s = timeout_s
    while left_s > 0 and not stop.drain.is_set():
        if gateway.is_ready:
            if all(view.phase is Phase.READY for view in gateway.views()):
                return
            left_s = min(left_s, SETTLING_S)
        await asyncio.sleep(POLL_INTERVAL_S)
        left_s -= POLL_INTERVAL_S


async def _nothing() -> None:
    """The default of what is done before the gateway refuses all work."""


async def serve(
    app: App,
    gateway: Gateway,
    sock: socket.socket,
    stop: StopSignals,
    *,
    idle_timeout_s: float,
    drain_timeout_s: float,
    use_server: Callable[[Server], None] = lambda server: None,
    on_listening: Callable[[], None] = lambda: None,
    hand_over: Callable[[], Awaitable[None]] = _nothing,
) -> None:
    """Serve until a stop signal, then drain: finish the accepted calls, close.

    While draining, the open connections are served to their end. A connection that is made later is refused its calls,
    or left to the next process, for which `sock` stays open. `hand_over` is awaited after the last connection and
    before all work is refused.
    """
    loop = asyncio.get_running_loop()
    requests = app.count_requests()
    server = _make_server(app, idle_timeout_s, app.accepts_body, requests)
    use_server(server)
    serving = [server]
    # uvloop accepts one connection per listener and iteration: with one listener a flood would delay other clients.
    listeners: list[asyncio.Server] = []
    for _ in range(LISTENERS):
        again = sock.dup()
        listeners.append(await loop.create_server(lambda: Connection(serving[-1], loop), sock=again, backlog=BACKLOG))
    on_listening()
    try:
        await stop.drain.wait()
        gateway.announce_drain()
        if stop.is_succeeded:
            await _stop_accepting(listeners)
        else:
            serving.append(_make_server(app, idle_timeout_s, _refusing_calls(app), requests))
        await _drain(serving, gateway, stop.force, drain_timeout_s, hand_over)
    finally:
        for listener in listeners:
            listener.close()
        if not stop.is_succeeded:
            sock.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_GRACE_S):
                await asyncio.gather(*(one.close() for one in serving))
        for one in serving:
            one.abort()


def _make_server(
    app: App, idle_timeout_s: float, accepts_body: Callable[[Request, str], bool], requests: RequestCounts
) -> Server:
    return Server(
        app.serve,
        max_body_bytes=app.limits.max_body_bytes,
        body_timeout_s=app.limits.body_timeout_s,
        idle_timeout_s=idle_timeout_s,
        accepts_body=accepts_body,
        requests=requests,
    )


def _refusing_calls(app: App) -> Callable[[Request, str], bool]:
    """What a draining gateway says to a request with a body: the same, except that calls are refused."""

    def accepts_body(request: Request, peer: str) -> bool:
        is_accepted = app.accepts_body(request, peer)
        if is_accepted and request.sink is None and request.problem is None:
            request.problem = Draining("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        return is_accepted and request.problem is None

    return accepts_body


async def _stop_accepting(listeners: list[asyncio.Server]) -> None:
    """Leave further connections to the next process. Those that this one has accepted by now are served."""
    for listener in listeners:
        listener.close()
    await asyncio.sleep(0)  # connections whose callbacks are under way


async def _drain(
    serving: list[Server],
    gateway: Gateway,
    force: asyncio.Event,
    grace_s: float,
    hand_over: Callable[[], Awaitable[None]],
) -> None:
    """Return when every accepted call was answered completely, or after `grace_s` seconds."""
    log.info("draining: refusing new calls, waiting up to %.0f s for running ones (signal again to stop now)", grace_s)
    loop = asyncio.get_running_loop()

    async def finish_replies() -> None:
        await serving[0].retire(KEEP_ALIVE_GRACE_S)
        await hand_over()
        await gateway.drain()
        for late in serving[1:]:
            await late.wait_until_idle()
            await late.close()

    draining, forcing = loop.create_task(finish_replies()), loop.create_task(force.wait())
    try:
        done, _ = await asyncio.wait({draining, forcing}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if draining not in done:
            log.warning("ending the remaining calls%s", "" if forcing in done else ": drain timeout reached")
            gateway.abandon()
            await asyncio.wait({draining}, timeout=ABANDON_GRACE_S)
            gateway.abandon(immediately=True)  # a worker that does not respond must not delay error responses
            await asyncio.wait({draining}, timeout=ABANDON_GRACE_S)
    finally:
        draining.cancel()
        forcing.cancel()
