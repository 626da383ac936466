"""Async jobs and callbacks, broken in one place at a time: addresses, signatures, retries, ends."""

from mutants.mutant import Mutant, MutantGroup

_POLICY = ("tests/durable/test_callback_policy.py",)
_CLIENT = ("tests/durable/test_callback_client.py",)
_CALLBACKS = ("tests/durable/test_callbacks.py",)
_RUNNER = ("tests/durable/test_async_job_runner.py",)
_HTTP = ("tests/e2e/test_async_jobs.py",)
_APIS = ("tests/e2e/test_stored_apis.py",)

GROUP = MutantGroup(
    tests=(*_POLICY, *_CLIENT, *_CALLBACKS, *_RUNNER, "tests/durable/test_async_job_queue.py", *_HTTP),
    mutants=(
        Mutant(
            "a job may be a background response",
            "ingress/stored_work/async_jobs.py",
            "    if found.background:",
            "    if False:",
            _HTTP,
        ),
        Mutant(
            "an item of a batch may be a background response",
            "durable/batch_input.py",
            "    if _is_set(found.background):",
            "    if False:",
            _APIS,
        ),
        Mutant(
            "a stored call begins a background response",
            "ingress/responses/endpoint.py",
            "if wanted.background and given is None and request.is_internal:",
            "if False:",
            _APIS,
        ),
        Mutant(
            "an IPv4 address within IPv6 is not looked at",
            "durable/callback_policy.py",
            "    if address.ipv4_mapped is not None:\n        return [address.ipv4_mapped]\n",
            "    if address.ipv4_mapped is not None:\n        return []\n",
            _POLICY,
        ),
        Mutant(
            "one allowed address is enough",
            "durable/callback_client.py",
            "check_addresses(found, self._policy)",
            "check_addresses(found[:1], self._policy)",
            _CLIENT,
        ),
        Mutant(
            "the connection resolves the name again",
            "durable/callback_client.py",
            "                        str(address),\n",
            "                        target.host,\n",
            _CLIENT,
        ),
        Mutant(
            "addresses are not checked after their resolution",
            "durable/callback_client.py",
            "        check_addresses(found, self._policy)\n",
            "",
            _CLIENT,
        ),
        Mutant(
            "TLS verifies no name",
            "durable/callback_client.py",
            "server_hostname=target.host if target.is_https else None",
            "server_hostname='hooks.example' if target.is_https else None",
            _CLIENT,
        ),
        Mutant(
            "denied networks come last",
            "durable/callback_policy.py",
            "    if _is_in(address, policy.denied_networks):\n        return False\n",
            "",
            _POLICY,
        ),
        Mutant(
            "http is allowed",
            "durable/callback_policy.py",
            'parts.scheme == "http" and policy.allow_http',
            'parts.scheme == "http"',
            _POLICY,
        ),
        Mutant(
            "the timestamp is not signed",
            "durable/callback_signature.py",
            "(id.encode(), timestamp, body)",
            "(id.encode(), 0, body)",
            ("tests/durable/test_callback_signature.py",),
        ),
        Mutant(
            "a redirect confirms a callback",
            "durable/callbacks.py",
            "200 <= one.status < 300",
            "200 <= one.status < 400",
            _CALLBACKS,
        ),
        Mutant(
            "callbacks are retried without end",
            "durable/callbacks.py",
            "(job.ended_at or 0.0) + self._policy.retry_for_s",
            "now + self._policy.retry_for_s",
            _CALLBACKS,
        ),
        Mutant(
            "a tenant may have every callback in flight",
            "durable/callbacks.py",
            "if by_tenant[job.tenant] < MAX_IN_FLIGHT_PER_TENANT:",
            "if by_tenant[job.tenant] < MAX_IN_FLIGHT:",
            _CALLBACKS,
        ),
        Mutant(
            "a job ends twice",
            "ledger/stores/async_jobs.py",
            "    .where(_IS_OPEN)\n    .values(\n",
            '    .where(_c.id == bindparam("job"))\n    .values(\n',
            (*_RUNNER, *_HTTP),
        ),
        Mutant(
            "an expired job keeps its call",
            "durable/async_job_runner.py",
            "            if entry.task is not None:\n                entry.task.cancel()\n",
            "",
            _RUNNER,
        ),
        Mutant(
            "the next try of a job begins before it is recorded",
            "durable/async_job_runner.py",
            "                await self._recorder.record(JobTry(job.id, tries))\n",
            "",
            _RUNNER,
        ),
        Mutant(
            "a try that was charged gets another job id",
            "durable/async_job_runner.py",
            "            if not is_charged:",
            "            if True:",
            _RUNNER,
        ),
        Mutant(
            "a job of another tenant can be read",
            "ledger/stores/async_jobs.py",
            "(_c.tenant == tenant) & (_c.id == id) & _is_visible(now)",
            "(_c.id == id) & _is_visible(now)",
            _HTTP,
        ),
        Mutant(
            "a job of another tenant can be deleted",
            "ledger/stores/async_jobs.py",
            "_delete(connection, (_c.tenant == tenant) & (_c.id == id))",
            "_delete(connection, _c.id == id)",
            _HTTP,
        ),
    ),
)
