"""Ids of jobs."""

import itertools
import os
import time
from collections.abc import Mapping

JOB_ID = b":job-id"
"""Header of stored calls, which name their job themselves. No HTTP client can send a name that begins with a colon."""

# Job ids are the ledger's key, so they must differ between gateways and between restarts of one gateway.
_id_prefix = f"{int(time.time()):x}{os.urandom(3).hex()}"
_id_counter = itertools.count(1)


def new_job_id() -> str:
    return f"{_id_prefix}-{next(_id_counter)}"


def job_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The id of the job that a request becomes: a new one, except for stored calls."""
    given = headers.get(JOB_ID)
    return new_job_id() if given is None else given.decode("ascii")
