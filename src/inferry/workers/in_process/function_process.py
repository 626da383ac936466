"""The process of a Python function: `python -m inferry.workers.in_process.function_process FD`.

It speaks `engine.messages`. The main thread reads the available messages, calls the function with at most `max_batch`
inputs, and sends the results. A second thread sends heartbeats. Whatever the function does to its process, the gateway
goes on. Errors name types only: the text of an exception may quote an input.
"""

import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from inferry.engine.messages import (
    Abort,
    Aborted,
    Account,
    AddInputs,
    Fatal,
    FunctionSetup,
    Ready,
    Returned,
    Shutdown,
    Stats,
    ToEngine,
)
from inferry.engine.process import Channel, PeerClosed, send_heartbeats
from inferry.pipelines.batched.functions import BatchedFunction
from inferry.pipelines.batched.outcomes import BatchResultError, OnError, await_all, call_all

logger = logging.getLogger(__name__)

CallAll = Callable[[list[Any]], list[Any | Exception]]


class FunctionLoop:
    """Calls the function with what has been added. An abort takes effect between two calls."""

    def __init__(self, call: CallAll, task: str, max_batch: int, channel: Channel) -> None:
        self._call = call
        self._convert = _CONVERTERS[task]
        self._max_batch = max_batch
        self._channel = channel
        self._waiting: deque[tuple[int, Any]] = deque()
        self._calls = 0
        self._busy_s = 0.0

    def run(self) -> None:
        """Run until Shutdown. Raises PeerClosed when the socket is closed."""
        while True:
            for message in self._channel.receive(wait=not self._waiting):
                if isinstance(message, Shutdown):
                    return
                self._apply(message)
            if self._waiting:
                self._channel.send(self._call_next())

    def _apply(self, message: ToEngine) -> None:
        match message:
            case AddInputs(inputs):
                self._waiting.extend(inputs)
            case Abort(call, keys):
                aborted = set(keys)
                freed = [Account(key, 0, 0, 0.0) for key, _ in self._waiting if key in aborted]
                self._waiting = deque(entry for entry in self._waiting if entry[0] not in aborted)
                stats = Stats(self._calls, 0, len(self._waiting), 0, 0, busy_seconds=self._busy_s)
                self._channel.send(Aborted(call, freed, stats))

    def _call_next(self) -> Returned:
        batch = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
        started_at = time.monotonic()
        outcomes = self._call([given for _, given in batch])
        seconds = time.monotonic() - started_at
        self._calls += 1
        self._busy_s += seconds
        results: list[tuple[int, bytes]] = []
        errors: list[tuple[int, str, bool]] = []
        for (key, _), outcome in zip(batch, outcomes, strict=True):
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                results.append((key, self._convert(outcome)))
            except BatchResultError as error:
                errors.append((key, str(error), True))
            except Exception as error:
                errors.append((key, f"the function raised {type(error).__name__}", False))
        return Returned(results, errors, seconds)


def _text(result: Any) -> bytes:
    if not isinstance(result, str):
        raise BatchResultError(f"the function returned a {type(result).__name__} instead of a text")
    return result.encode(errors="replace")


def _score(result: Any) -> bytes:
    try:
        return array("f", [float(result)]).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise BatchResultError(f"the function returned a {type(result).__name__} instead of a score") from None


def _vector(result: Any) -> bytes:
    try:
        return array("f", result).tobytes()
    except (TypeError, OverflowError):
        raise BatchResultError(f"the function returned a {type(result).__name__} instead of a vector") from None


_CONVERTERS: dict[str, Callable[[Any], bytes]] = {"generate": _text, "score": _score, "embed": _vector}


def _load(path: str) -> tuple[Callable[[list[Any]], Any], OnError]:
    """The function, and what happens when it raises. Of a batched function only the function itself is used."""
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if isinstance(function, BatchedFunction):
        return function.function, function.on_error
    if not callable(function):
        raise TypeError(f"{path} is a {type(function).__name__} and not a function")
    return function, "bisect"


def _serve(channel: Channel, runner: asyncio.Runner) -> None:
    (setup,) = channel.receive(wait=True)
    if not isinstance(setup, FunctionSetup):
        raise TypeError("the first message must be FunctionSetup")
    sys.path.insert(0, setup.directory)
    try:
        function, on_error = _load(setup.function)
    except Exception as error:
        logger.exception("importing the function failed")
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        return
    name = setup.function.rpartition(":")[2]
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def call(inputs: list[Any]) -> list[Any | Exception]:
        if is_async:
            return runner.run(await_all(function, name, inputs, on_error))
        return call_all(function, name, inputs, on_error)

    channel.send(Ready(0, 0, 0, 0, [], 0, (setup.task,)))
    threading.Thread(target=send_heartbeats, args=(channel,), name="heartbeat", daemon=True).start()
    try:
        FunctionLoop(call, setup.task, setup.max_batch, channel).run()
    except PeerClosed:
        raise
    except BaseException as error:  # such as SystemExit: the worker starts another process
        logger.error("the function ended its process\n%s", "".join(traceback.format_tb(error.__traceback__)))
        channel.send(Fatal(f"the function raised {type(error).__name__}"))


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    with (
        asyncio.Runner() as runner,
        socket.socket(fileno=int(sys.argv[1])) as sock,
        contextlib.suppress(PeerClosed),
    ):
        _serve(Channel(sock), runner)
        sock.close()
        os._exit(0)  # threads of the function do not keep its process


if __name__ == "__main__":
    main()
