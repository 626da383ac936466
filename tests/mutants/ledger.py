"""The ledger, broken in one place at a time: the recorder, the read side, what was spent before a start."""

from mutants.mutant import Mutant, MutantGroup

_RECORDER = ("tests/ledger/test_recorder.py",)
_LOCK = ("tests/cli/test_cli_mistakes.py",)
_QUERIES = ("tests/ledger/test_ledger_queries.py", "tests/ledger/test_ledger_bounds.py")
_SPENDING = ("tests/ledger/test_spending_queries.py", "tests/ledger/test_ledger_bounds.py")

GROUP = MutantGroup(
    tests=(*_SPENDING, *_QUERIES, *_RECORDER, "tests/ledger/test_sqlite_ledger.py"),
    mutants=(
        Mutant(
            "a database is locked by its name alone",
            "ledger/stores/file_lock.py",
            "        _lock_database(database, handles[1])\n",
            "",
            _LOCK,
        ),
        Mutant(
            "one entry more than may be kept is kept",
            "ledger/recorder.py",
            "buffered >= self._max_buffered",
            "buffered > self._max_buffered",
            _RECORDER,
        ),
        Mutant(
            "discarded entries are not counted as dropped",
            "ledger/recorder.py",
            "return self._dropped + self._discarded",
            "return self._dropped",
            _RECORDER,
        ),
        Mutant(
            "one entry that cannot be held takes its batch along",
            "ledger/recorder.py",
            "                    for entry in batch:\n                        self._write([entry])\n",
            "                    self._settle(discarded=len(batch))\n",
            _RECORDER,
        ),
        Mutant(
            "buffered entries are dropped at close",
            "ledger/recorder.py",
            "                while batch := self._take_batch():\n",
            "                while not closing and (batch := self._take_batch()):\n",
            _RECORDER,
        ),
        Mutant(
            "the since filter excludes its boundary",
            "ledger/queries.py",
            "conditions.append(attempts.c.ended_at >= since)",
            "conditions.append(attempts.c.ended_at > since)",
            _QUERIES,
        ),
        Mutant(
            "a page shows its last run again",
            "ledger/queries.py",
            "[last_end < before]",
            "[last_end <= before]",
            _QUERIES,
        ),
        Mutant(
            "the middle of an even number of waits is the lower one",
            "ledger/queries.py",
            "between(row.waits, row.waits + 2)",
            "between(row.waits, row.waits + 1)",
            _QUERIES,
        ),
        Mutant(
            "a job that was stopped and could not go on has not failed",
            "ledger/queries.py",
            '"failed": (Outcome.FAILED, Outcome.PREEMPTED)',
            '"failed": (Outcome.FAILED,)',
            _QUERIES,
        ),
        Mutant(
            "a job that was tried again counts twice",
            "ledger/queries.py",
            'jobs_where(row.is_last).label("jobs")',
            'func.count().label("jobs")',
            _QUERIES,
        ),
        Mutant(
            "a tree includes runs of another tenant",
            "ledger/timeline_queries.py",
            "select(attempts.c.run_id).where(attempts.c.tenant == tenant, attempts.c.parent_run == below.c.run_id)",
            "select(attempts.c.run_id).where(attempts.c.parent_run == below.c.run_id)",
            _QUERIES,
        ),
        Mutant(
            "sub-runs of another tenant are listed",
            "ledger/queries.py",
            ".where(attempts.c.tenant == tenant, attempts.c.parent_run == run)",
            ".where(attempts.c.parent_run == run)",
            _QUERIES,
        ),
        Mutant(
            "another tenant's run of the same name is one's own",
            "ledger/queries.py",
            ".where(*_matching(tenant, run, None)).limit(1)",
            ".where(*_matching(None, run, None)).limit(1)",
            _QUERIES,
        ),
        Mutant(
            "tokens of unknown GPU time make a GPU faster",
            "ledger/queries.py",
            "case((row.gpu_seconds.is_not(None), row.prompt_tokens - row.cached_tokens + row.output_tokens))",
            "(row.prompt_tokens - row.cached_tokens + row.output_tokens)",
            _QUERIES,
        ),
        Mutant(
            "cached tokens make a GPU faster",
            "ledger/queries.py",
            "row.prompt_tokens - row.cached_tokens + row.output_tokens",
            "row.prompt_tokens + row.output_tokens",
            _QUERIES,
        ),
        Mutant(
            "the first attempt of a job is listed before the last",
            "ledger/queries.py",
            "attempts.c.job_id, attempts.c.attempt.desc()",
            "attempts.c.job_id, attempts.c.attempt",
            _QUERIES,
        ),
        Mutant(
            "calls side by side are active one after the other",
            "ledger/queries.py",
            "(reached < end, end - reached),",
            "(reached < end, end - start),",
            _QUERIES,
        ),
        Mutant(
            "a run that was cancelled at the very moment asked for is not found",
            "ledger/queries.py",
            'attempts.c.ended_at >= since, attempts.c.error_code == "run_cancelled"',
            'attempts.c.ended_at > since, attempts.c.error_code == "run_cancelled"',
            _QUERIES,
        ),
        Mutant(
            "the first moment of a day belongs to no day",
            "ledger/spending_queries.py",
            "_row.ended_at >= begin",
            "_row.ended_at > begin",
            _SPENDING,
        ),
        Mutant(
            "a tenant's spending is that of its last key",
            "ledger/spending_queries.py",
            "tenants[tenant] = (before[0] + tokens, before[1] + nanos)",
            "tenants[tenant] = (tokens, nanos)",
            _SPENDING,
        ),
        Mutant(
            "a run that is just not over is over",
            "ledger/spending_queries.py",
            "if ended_at >= active_since and",
            "if ended_at > active_since and",
            _SPENDING,
        ),
        Mutant(
            "lost attempts are charged after a restart",
            "ledger/spending_queries.py",
            "_BILLABLE_OUTCOMES = (Outcome.DONE.value, Outcome.CANCELLED.value)",
            "_BILLABLE_OUTCOMES = tuple(one.value for one in Outcome)",
            _SPENDING,
        ),
        Mutant(
            "cancelled attempts are free after a restart",
            "ledger/spending_queries.py",
            "_BILLABLE_OUTCOMES = (Outcome.DONE.value, Outcome.CANCELLED.value)",
            "_BILLABLE_OUTCOMES = (Outcome.DONE.value,)",
            _SPENDING,
        ),
        Mutant(
            "a month begins with every day",
            "ledger/spending_queries.py",
            "today.replace(day=1).timestamp()",
            "today.timestamp()",
            _SPENDING,
        ),
        Mutant(
            "a tree is as old as its youngest name",
            "ledger/spending_queries.py",
            "max(ended_at, row.ended_at)",
            "row.ended_at",
            _SPENDING,
        ),
    ),
)
