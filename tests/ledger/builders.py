"""Entries for tests of the ledger."""

from typing import Any

from inferry.domain.ledger import LedgerEntry, Outcome


def an_entry(job: str | int = "job-1", **fields: Any) -> LedgerEntry:
    return LedgerEntry(
        **{
            "job_id": f"job-{job}" if isinstance(job, int) else job,
            "attempt": 1,
            "tenant": "acme",
            "run_id": "run-1",
            "step_id": "step-1",
            "model": "tiny",
            "lane": "P1",
            "outcome": Outcome.DONE,
            "ended_at": 1_000.0,
            **fields,
        }
    )


def entries(count: int, first: int = 0) -> list[LedgerEntry]:
    return [an_entry(number) for number in range(first, first + count)]
