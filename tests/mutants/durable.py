"""Stored work, broken in one place at a time: results, tries, shares, files."""

from mutants.mutant import Mutant, MutantGroup

_RUNNER = ("tests/durable/test_batch_store.py", "tests/durable/test_batch_runner.py")
_DOCUMENTS = ("tests/durable/test_documents.py",)
_PROVIDERS = ("tests/durable/test_provider_run.py",)
_RETRIES = ("tests/durable/test_call_retries.py",)
_FILES = ("tests/ingress/stored_work/test_files.py",)
_QUEUE = ("tests/durable/test_work_runner.py",)
_OUTAGES = ("tests/durable/test_work_runner_outages.py",)
_PULLED = ("tests/durable/test_pulled_work.py",)

GROUP = MutantGroup(
    tests=(
        *_RETRIES,
        *_DOCUMENTS,
        *_RUNNER,
        *_PROVIDERS,
        *_QUEUE,
        "tests/ingress/stored_work",
        "tests/ingress/test_stored_calls.py",
    ),
    mutants=(
        Mutant(
            "a submission whose answer was lost is repeated",
            "durable/provider_run.py",
            "        if batch.is_begun:\n",
            "        if False:\n",
            _PROVIDERS,
        ),
        Mutant(
            "a provider batch runs on after the deadline",
            "durable/provider_run.py",
            "return self.is_cancelled or self._providers.clock.wall() >= batch.deadline",
            "return self.is_cancelled",
            _PROVIDERS,
        ),
        Mutant(
            "items at the batch API cost the full price",
            "durable/provider_run.py",
            "-int(-cost * provider.price_factor // 1)",
            "cost",
            _PROVIDERS,
        ),
        Mutant(
            "a result replaces an earlier one",
            "ledger/stores/batches.py",
            '    & (batch_items.c.number == bindparam("at"))\n    & batch_items.c.outcome.is_(None)\n',
            '    & (batch_items.c.number == bindparam("at"))\n',
            _RUNNER,
        ),
        Mutant(
            "every try has the same job id",
            "durable/retries.py",
            "job_id=try_id(call.job_id, tries)",
            "job_id=try_id(call.job_id, 0)",
            _RETRIES,
        ),
        Mutant(
            "the next try begins before it is recorded",
            "durable/retries.py",
            "            await record_try(tries)\n",
            "",
            _RETRIES,
        ),
        Mutant(
            "a try that was charged is charged again",
            "durable/batch_run.py",
            "            if not item.is_charged:",
            "            if True:",
            _RUNNER,
        ),
        Mutant(
            "a limit of 0 is retried",
            "durable/retries.py",
            "answer.status in _REFUSED and answer.retry_after_s is not None",
            "answer.status in _REFUSED",
            _RETRIES,
        ),
        Mutant(
            "results are written before the ledger",
            "durable/result_recorder.py",
            "        self._write_ledger()\n",
            "",
            _RUNNER,
        ),
        Mutant(
            "batches of one tenant do not share",
            "durable/batch_runner.py",
            " // batches[self._tenants[id]])",
            ")",
            _RUNNER,
        ),
        Mutant(
            "a deadline ends nothing",
            "durable/batch_run.py",
            "asyncio.timeout(max(0.0, self._batch.deadline - self._clock.wall()))",
            "asyncio.timeout(None)",
            _RUNNER,
        ),
        Mutant(
            "entries of several streams are mixed up",
            "domain/work_queue.py",
            "        return self.stream, self.entry\n",
            '        return "", self.entry\n',
            _QUEUE,
        ),
        Mutant(
            "no work is given up",
            "durable/work_runner.py",
            "        if self._give_up is not None:\n",
            "        if self._give_up is None:\n",
            _QUEUE,
        ),
        Mutant(
            "work that has ended elsewhere goes on",
            "durable/work_runner.py",
            "await self._source.ended(ids) if ids else ()",
            "()",
            _QUEUE,
        ),
        Mutant(
            "what the queue lost is not added again",
            "durable/queued_jobs.py",
            "added += await self._queue.add([_new_work(job) for job in page if job.deadline > now])",
            "added += 0",
            _QUEUE,
        ),
        Mutant(
            "work in progress is claimed after a pause of the queue",
            "durable/work_runner.py",
            "        if not self._streak.is_complete(asyncio.get_running_loop().time()):\n            return\n",
            "",
            _OUTAGES,
        ),
        Mutant(
            "renewals wait for the gateway",
            "durable/work_runner.py",
            "        for key in self.renewal.lost:\n",
            "        await self._source.ended([])\n        for key in self.renewal.lost:\n",
            _OUTAGES,
        ),
        Mutant(
            "the result of an item is lost with the database",
            "durable/work_source.py",
            "await self._retried(self._items.load_items, [item])",
            "await self._run(self._items.load_items, [item])",
            _OUTAGES,
        ),
        Mutant(
            "a refused load is repeated for ever",
            "durable/work_runner.py",
            "            except WorkRefused as error:\n",
            "            except ZeroDivisionError as error:\n",
            _OUTAGES,
        ),
        Mutant(
            "a refused result is repeated as it is",
            "durable/gateway_work.py",
            "replace(report, answer=None, problem=",
            "replace(report, problem=",
            _PULLED,
        ),
        Mutant(
            "an answer has all work at once",
            "durable/pulled_work.py",
            "                if loaded.work and size > self._loaded_bytes:\n",
            "                if False:\n",
            _PULLED,
        ),
        Mutant(
            "the model that a pull-worker reports has the price",
            "durable/pulled_work.py",
            "cost_nanos=self._cost_of(charged)",
            "cost_nanos=self._cost_of(entry)",
            _PULLED,
        ),
        Mutant(
            "the window never shrinks",
            "durable/window.py",
            "        self._size = float(max(1, admitted))\n",
            "",
            _RUNNER,
        ),
        Mutant(
            "an expired document is found",
            "ledger/stores/documents.py",
            "(documents.c.expires_at > now)",
            "(documents.c.expires_at > 0)",
            _DOCUMENTS,
        ),
        Mutant(
            "files of all tenants are listed",
            "ledger/stores/files.py",
            "connection, files, query, files.c.tenant == tenant, after",
            "connection, files, query, files.c.tenant != '', after",
            _FILES,
        ),
        Mutant(
            "a quota counts nothing",
            "ledger/stores/files.py",
            "used_bytes(connection, file.tenant) + len(data) > quota_bytes",
            "len(data) > quota_bytes",
            _FILES,
        ),
        Mutant(
            "a sink is never full",
            "ingress/stored_work/upload.py",
            "        self.is_full = self._buffered > BUFFER_BYTES\n",
            "",
            _FILES,
        ),
        Mutant(
            "a stored call takes a job id of its own",
            "ingress/job_ids.py",
            "new_job_id() if given is None else given.decode",
            "new_job_id() or given.decode",
            ("tests/ingress/test_stored_calls.py",),
        ),
    ),
)
