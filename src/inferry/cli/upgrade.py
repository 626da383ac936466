"""Replaces the running process image by the present code and configuration, on SIGHUP.

The process keeps its id and its listening sockets. Connections that arrive meanwhile wait in the sockets' queues.
"""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from inferry.cli import sd_notify
from inferry.cli.listening import Listening, pass_on

log = logging.getLogger("inferry")

CHECK_TIMEOUT_S = 120.0


def is_possible() -> bool:
    """Whether SIGHUP means an upgrade. At a terminal it means that the terminal is closed, and nohup ignores it."""
    return not sys.stderr.isatty() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def check(config_file: Path | None) -> bool:
    """Whether the code and the configuration on disk would start. The reason is logged where they would not."""
    command = [sys.executable, "-m", "inferry", "check-config"]
    command += [] if config_file is None else ["--config", str(config_file)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)  # noqa: S603
        problem = found.stderr.strip() if found.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log.error("no upgrade: the configuration cannot be used: %s", problem)
        return False
    log.info("upgrading: calls that arrive from now on wait for the new process image")
    sd_notify.notify(sd_notify.reloading())
    return True


def restart(listening: Listening) -> NoReturn:
    """Start the command of this process anew, in this process, with its sockets."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, **pass_on(listening)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606
