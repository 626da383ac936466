"""The engine's process: `python -m inferry.engine.process FD`, where FD is its end of a socket pair.

The main thread owns all state. It reads the available messages, computes one step, and sends the result; without work
it blocks in a read. A second thread sends heartbeats, also during a long step, so that a missing heartbeat means a
frozen process. The process ends on Shutdown or when the socket is closed. Signals to the process group do not end it:
the gateway decides when the engine stops.
"""

import contextlib
import importlib.util
import logging
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from inferry.engine.adapter_control import AdapterControl
from inferry.engine.core import EngineCore
from inferry.engine.grammars import Grammars
from inferry.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    Abort,
    Aborted,
    Add,
    EndRun,
    Fatal,
    Frames,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    Ready,
    Setup,
    Shutdown,
    ToEngine,
    UnloadAdapter,
    decode_to_engine,
    frame,
)

if TYPE_CHECKING:
    from inferry.engine.config import EngineConfig
    from inferry.engine.gpu.runner import GpuRunner
    from inferry.engine.runners import Runner

logger = logging.getLogger(__name__)


class PeerClosed(Exception):
    """The socket was closed by the gateway."""


class Channel:
    """Messages over a blocking socket. One thread may receive; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames()
        self._inbox: list[ToEngine] = []
        self._sending = threading.Lock()

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """The messages received so far; with `wait`, at least one."""
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
    """Send heartbeats until the socket is closed."""
    with contextlib.suppress(PeerClosed):
        while True:
            channel.send(Heartbeat())
            time.sleep(HEARTBEAT_INTERVAL_S)


class EngineLoop:
    """Reads messages, runs steps, sends results. A received abort takes effect before the next step."""

    def __init__(self, core: EngineCore, channel: Channel, adapters: AdapterControl | None = None) -> None:
        self._core = core
        self._channel = channel
        self._adapters = adapters or AdapterControl(core, None, 0)

    def run(self) -> None:
        """Run until Shutdown. Raises Hangup when the socket is closed."""
        while True:
            for message in self._channel.receive(wait=not self._core.has_work):
                if isinstance(message, Shutdown):
                    return
                self._apply(message)
            if self._core.has_work:
                self._channel.send(self._core.step())
            for unloaded in self._adapters.unloaded():
                self._channel.send(unloaded)

    def _apply(self, message: ToEngine) -> None:
        match message:
            case Add(requests):
                for request in requests:
                    rejected = self._adapters.rejection(request) or self._core.add(request)
                    if rejected is not None:
                        self._channel.send(rejected)
            case Abort(call, keys):
                freed = self._core.abort(keys)
                self._channel.send(Aborted(call, freed, self._core.stats()))
            case EndRun(run):
                self._core.pool.end_run(run)
            case LoadAdapter(adapter, directory):
                self._channel.send(self._adapters.load(adapter, directory))
            case UnloadAdapter(adapter):
                self._adapters.unload(adapter)


def _serve(channel: Channel) -> None:
    (setup,) = channel.receive(wait=True)
    if not isinstance(setup, Setup):
        raise TypeError("the first message must be Setup")
    try:
        core, ready, adapters = _build(Path(setup.model_dir), setup.config)
    except Exception as error:
        logger.exception("loading the model failed")
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        return
    channel.send(ready)
    threading.Thread(target=send_heartbeats, args=(channel,), name="heartbeat", daemon=True).start()
    try:
        EngineLoop(core, channel, adapters).run()
    except PeerClosed:
        raise
    except Exception as error:
        # Only the stack: an exception's message may quote tokens.
        logger.error("fatal engine error\n%s", "".join(traceback.format_tb(error.__traceback__)))
        channel.send(Fatal(type(error).__name__))


def _build(model_dir: Path, config: "EngineConfig") -> tuple[EngineCore, Ready, AdapterControl]:
    # Imported here: torch takes a second, and a closed socket is noticed before that.
    from inferry.engine.runner import TorchRunner, fitted_to_cpu, set_threads

    threads = set_threads(config.threads)
    runner: TorchRunner | GpuRunner
    if config.device == "cuda":
        # Imported here: the CPU's engine works without triton.
        from inferry.engine.gpu.loading import CUDA, fitted_to_gpu, load_runner

        config = fitted_to_gpu(model_dir, config)
        runner = load_runner(model_dir, config, CUDA)
    else:
        config = fitted_to_cpu(model_dir, config)
        runner = TorchRunner.load(model_dir, config)
    runner.warm_up()
    core = EngineCore(runner, config, grammars=_grammars(model_dir, config, runner))
    ready = Ready(
        context_tokens=core.context_tokens,
        kv_tokens=core.kv_tokens,
        block_tokens=config.block_tokens,
        vocab_size=runner.vocab_size,
        eos_ids=sorted(runner.eos_ids),
        threads=threads,
        tasks=runner.tasks,
        features=runner.features,
        labels=runner.labels,
    )
    return core, ready, AdapterControl(core, runner.adapters, config.max_adapters)


def _grammars(model_dir: Path, config: "EngineConfig", runner: "Runner") -> Grammars | None:
    """None without llguidance, or without a tokenizer."""
    if importlib.util.find_spec("llguidance") is None or not (model_dir / "tokenizer.json").is_file():
        return None
    grammars = Grammars(model_dir, runner.vocab_size, runner.eos_ids, config.tool_format)
    grammars.wait_until_loaded()  # at startup, so that neither the first call nor the idle engine pays for it
    return grammars


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(PeerClosed):
        _serve(Channel(sock))


if __name__ == "__main__":
    main()
