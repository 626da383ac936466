"""The engine's own process: `python -m inferry.engine.process FD`, where FD is its end of a socket pair.

One thread owns everything. It reads all messages that are there, then computes one step, then says what came of it;
with nothing to do it sleeps in a read. A second does nothing but say that the process runs, also while a step takes
long: who hears nothing at all knows that it is frozen. It ends when told to, or when the other end is gone, however it
died. Signals meant for a whole group or service do not end it: the gateway decides when the engine stops.
"""

import contextlib
import logging
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from inferry.engine.core import EngineCore
from inferry.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    Abort,
    Aborted,
    Add,
    Fatal,
    Frames,
    FromEngine,
    Heartbeat,
    Ready,
    Setup,
    Shutdown,
    ToEngine,
    decode_to_engine,
    frame,
)

if TYPE_CHECKING:
    from inferry.engine.config import EngineConfig

logger = logging.getLogger(__name__)


class PeerClosed(Exception):
    """The other end of the socket is gone."""


class Channel:
    """Messages over a blocking socket. One thread may receive; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames()
        self._inbox: list[ToEngine] = []
        self._sending = threading.Lock()

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """All that has come in; with `wait`, at least one message."""
        while True:
            try:
                data = self._sock.recv(1 << 18, 0 if wait and not self._inbox else socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerClosed from error
            if not data:
                raise PeerClosed
            self._inbox += map(decode_to_engine, self._frames.feed(data))
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        try:
            with self._sending:
                self._sock.sendall(frame(message))
        except OSError as error:
            raise PeerClosed from error


def send_heartbeats(channel: Channel) -> None:
    """Say that the process runs, until nobody is there to hear it."""
    with contextlib.suppress(PeerClosed):
        while True:
            channel.send(Heartbeat())
            time.sleep(HEARTBEAT_INTERVAL_S)


class EngineLoop:
    """Drains the inbox, steps, answers. An abort that has arrived takes effect before the next step."""

    def __init__(self, core: EngineCore, channel: Channel) -> None:
        self._core = core
        self._channel = channel

    def run(self) -> None:
        """Until Shutdown; raises Hangup when the other end goes away."""
        while True:
            for message in self._channel.receive(wait=not self._core.has_work):
                match message:
                    case Add(requests):
                        for request in requests:
                            rejected = self._core.add(request)
                            if rejected is not None:
                                self._channel.send(rejected)
                    case Abort(call, keys):
                        freed = self._core.abort(keys)
                        self._channel.send(Aborted(call, freed, self._core.stats()))
                    case Shutdown():
                        return
            if self._core.has_work:
                self._channel.send(self._core.step())


def _serve(channel: Channel) -> None:
    (setup,) = channel.receive(wait=True)
    if not isinstance(setup, Setup):
        raise TypeError("the first message is Setup")
    try:
        core, ready = _build(Path(setup.model_dir), setup.config)
    except Exception as error:
        logger.exception("the model cannot be loaded")
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        return
    channel.send(ready)
    threading.Thread(target=send_heartbeats, args=(channel,), name="heartbeat", daemon=True).start()
    try:
        EngineLoop(core, channel).run()
    except PeerClosed:
        raise
    except Exception as error:
        # Where it happened, not what it said: a message might quote the tokens it fell over.
        logger.error("the engine cannot go on\n%s", "".join(traceback.format_tb(error.__traceback__)))
        channel.send(Fatal(type(error).__name__))


def _build(model_dir: Path, config: "EngineConfig") -> tuple[EngineCore, Ready]:
    # Here and not above: torch takes a second to import, and a parent that is already gone is noticed before that.
    from inferry.engine.runner import TorchRunner, set_threads

    threads = set_threads(config.threads)
    runner = TorchRunner.load(model_dir, config)
    runner.warm_up()
    core = EngineCore(runner, config)
    ready = Ready(
        context_tokens=core.context_tokens,
        kv_tokens=core.kv_tokens,
        block_tokens=config.block_tokens,
        vocab_size=runner.vocab_size,
        eos_ids=sorted(runner.eos_ids),
        threads=threads,
    )
    return core, ready


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(PeerClosed):
        _serve(Channel(sock))


if __name__ == "__main__":
    main()
