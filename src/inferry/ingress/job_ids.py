"""Ids of jobs."""

import itertools
import os
import time
from collections.abc import Mapping
from typing import Final

JOB_ID: Final = b":job-id"
"""Header of stored calls, which name their job themselves. No HTTP client can send a name that begins with a colon."""
COMPOSED: Final = b":composed"
"""Header of the steps of composed models: the model's name, a slash, and the stage."""
MADE_RUN: Final = b":made-run"
"""Header of steps whose run the gateway has made for their call, because the client named none."""


def _make_prefix() -> str:
    """Job ids are the ledger's key, so they must differ between processes and between restarts of one gateway."""
    return f"{int(time.time()):x}{os.urandom(3).hex()}"


_id_prefix = _make_prefix()
_id_counter: Final = itertools.count(1)


def _renew_prefix() -> None:
    global _id_prefix
    _id_prefix = _make_prefix()


os.register_at_fork(after_in_child=_renew_prefix)


def new_job_id() -> str:
    return f"{_id_prefix}-{next(_id_counter)}"


def job_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The id of the job that a request becomes: a new one, except for stored calls."""
    given = headers.get(JOB_ID)
    return new_job_id() if given is None else given.decode("ascii")


def composed_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The composed model and stage that a request is a step of."""
    given = headers.get(COMPOSED)
    return None if given is None else given.decode()
