"""Which jobs the ledger has charged. Used where work is repeated after a process was killed."""

from collections.abc import Iterable

from sqlalchemy import Connection, select

from inferry.domain.ledger import Outcome
from inferry.ledger.schema import attempts


def charged_jobs(connection: Connection, job_ids: Iterable[str]) -> frozenset[str]:
    """Those of the jobs that have a row of a successful attempt."""
    query = select(attempts.c.job_id).where(
        attempts.c.job_id.in_(list(job_ids)), attempts.c.outcome == Outcome.DONE.value
    )
    return frozenset(job_id for (job_id,) in connection.execute(query))
