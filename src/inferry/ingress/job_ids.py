"""Ids of jobs."""

import itertools
import os
import time

# Job ids are the ledger's key, so they must differ between gateways and between restarts of one gateway.
_id_prefix = f"{int(time.time()):x}{os.urandom(3).hex()}"
_id_counter = itertools.count(1)


def new_job_id() -> str:
    return f"{_id_prefix}-{next(_id_counter)}"
