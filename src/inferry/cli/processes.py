"""Supervises the processes of one gateway: starts them, restarts those that die, and stops them together.

The supervisor is a plain loop over signals. It has no threads and opens nothing that its children use, so that
they are made by fork. A child ends by itself when the supervisor is gone: the other end of its pipe is closed then.
SIGHUP has every child drain for a successor: the caller of `run` starts the supervisor anew when all have ended.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from rich.console import Console

from inferry.cli.config.schema import ConfigError
from inferry.cli.sd_notify import READY, STOPPING, notify
from inferry.cli.terminal import USAGE_ERROR

log = logging.getLogger("inferry")

FIRST_RESTART_S = 0.1
MAX_RESTART_S = 5.0
STABLE_S = 10.0
"""A child that has run for this long is restarted at once; another one later after each failure."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)

Role = tuple[str, Callable[[int, bool], None]]
"""A name, and what the process runs, with the pipe that it watches, and whether it replaces one that has ended."""


class Child:
    """One process, and when it is started again."""

    def __init__(self, name: str, work: Callable[[int, bool], None]) -> None:
        self.name = name
        self.work = work
        self.pid: int | None = None
        self.started_at = 0.0
        self.restart_at: float | None = None
        self.delay_s = 0.0


class Supervisor:
    """`run` returns the exit status once every process has ended.

    `may_upgrade` is called before SIGHUP has an effect; None: the signal has its usual meaning.
    """

    def __init__(self, roles: Sequence[Role], may_upgrade: Callable[[], bool] | None = None) -> None:
        self._children = [Child(name, work) for name, work in roles]
        self._lifeline = (-1, -1)
        self._is_stopping = False
        self._status = 0
        self._may_upgrade = may_upgrade
        self._signals = _SIGNALS if may_upgrade is not None else tuple(one for one in _SIGNALS if one != signal.SIGHUP)
        self.is_upgrade = False

    def run(self) -> int:
        self._lifeline = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            for child in self._children:
                self._start(child)
            notify(READY)
            while any(child.pid is not None or child.restart_at is not None for child in self._children):
                self._handle(signal.sigtimedwait(self._signals, self._pause_s()))
        finally:
            # After an upgrade SIGHUP stays blocked until the next process image handles it.
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked | ({signal.SIGHUP} if self.is_upgrade else set()))
            for end in self._lifeline:
                os.close(end)
        return self._status

    def _pause_s(self) -> float:
        due = [child.restart_at for child in self._children if child.restart_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else 3600.0

    def _handle(self, received: signal.struct_siginfo | None) -> None:
        number = None if received is None else received.si_signo
        if number in (signal.SIGTERM, signal.SIGINT):
            self.is_upgrade = False
            notify(STOPPING)
            self._stop(signal.SIGTERM)
        elif (
            number == signal.SIGHUP and not self._is_stopping and self._may_upgrade is not None and self._may_upgrade()
        ):
            self.is_upgrade = True
            self._stop(signal.SIGHUP)
        self._reap()
        now = time.monotonic()
        for child in self._children:
            if child.restart_at is not None and child.restart_at <= now:
                self._start(child)

    def _stop(self, number: signal.Signals) -> None:
        """Have every child drain; a second time, have it stop at once. SIGHUP: for a successor."""
        self._is_stopping = True
        for child in self._children:
            child.restart_at = None
            if child.pid is not None:
                os.kill(child.pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in self._children:
                if child.pid == pid:
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: Child, status: int) -> None:
        pid, child.pid = child.pid, None
        if self._is_stopping:
            self._status = self._status or max(0, status)
            return
        if status == USAGE_ERROR:
            self._status = status  # its message has been printed, and a restart would not help
            self._stop(signal.SIGTERM)
            return
        now = time.monotonic()
        is_stable = now - child.started_at >= STABLE_S
        child.delay_s = 0.0 if is_stable else min(max(FIRST_RESTART_S, 2 * child.delay_s), MAX_RESTART_S)
        child.restart_at = now + child.delay_s
        cause = f"signal {-status}" if status < 0 else f"status {status}"
        log.error("process %s (pid %d) ended with %s; restart in %.1f s", child.name, pid, cause, child.delay_s)

    def _start(self, child: Child) -> None:
        child.restart_at = None
        is_restart, child.started_at = child.started_at > 0, time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._run_child(child, is_restart)
        child.pid = pid
        log.info("started process %s (pid %d)", child.name, pid)

    def _run_child(self, child: Child, is_restart: bool) -> None:
        """In the new process. Never returns."""
        status = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C is for the supervisor, which tells the children
            os.close(self._lifeline[1])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
            child.work(self._lifeline[0], is_restart)
            status = 0
        except ConfigError as error:
            Console(stderr=True, soft_wrap=True).print(f"inferry: {error}", style="bold red", markup=False)
            status = USAGE_ERROR
        except BaseException:
            traceback.print_exc()
        finally:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
