"""The link between processes, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_LINK = ("tests/cluster/test_link.py", "tests/cluster/test_link_access.py")
_ROLES = ("tests/cluster/test_roles.py",)
_SCHEDULING = ("tests/cluster/test_remote_in_scheduling.py",)
_CONTRACT = ("tests/contracts/test_worker_contract.py",)
_PROCESSES = ("tests/e2e/test_processes.py",)
_LOST = ("tests/e2e/test_lost_processes.py",)

GROUP = MutantGroup(
    tests=(*_LINK, *_SCHEDULING, *_ROLES),
    mutants=(
        Mutant(
            "an ingress without the secret may connect",
            "cluster/handshake.py",
            " or not hmac.compare_digest(hello.proof, expected):",
            ":",
            _LINK,
        ),
        Mutant(
            "an owner without the secret is believed",
            "cluster/handshake.py",
            "    if not hmac.compare_digest(answer.proof, expected):",
            "    if not answer:",
            _LINK,
        ),
        Mutant(
            "an owner of an earlier epoch is obeyed",
            "workers/remote/owner_link.py",
            "            if message.epoch < self._address.epoch:",
            "            if message.epoch < 0:",
            _LINK,
        ),
        Mutant(
            "the socket may be used by others",
            "cluster/owner_server.py",
            "        mask = os.umask(0o177)",
            "        mask = os.umask(0o000)",
            _LINK,
        ),
        Mutant(
            "the owner admits what the ingress was to admit",
            "cluster/owner_server.py",
            "if message.is_admitted else owner.caller(job.tenant, job.key_id)",
            "if job.tenant else owner.caller(job.tenant, job.key_id)",
            _LINK,
        ),
        Mutant(
            "jobs of a lost ingress process continue",
            "cluster/owner_server.py",
            '            self._gateway.cancel(owned.job.job_id, IngressLost("the ingress process',
            '            str(IngressLost("the ingress process',
            _LINK,
        ),
        Mutant(
            "output that is not read is kept without a limit",
            "cluster/owner_server.py",
            "        elif connection.is_paused and self.stream.unread_bytes > MAX_UNREAD_BYTES:",
            "        elif connection.is_paused and self.stream.unread_bytes < 0:",
            _LINK,
        ),
        Mutant(
            "a resumed attempt is not announced",
            "cluster/owner_server.py",
            "            connection.send(Restart(key, attempt.job.attempt, fields))\n",
            "",
            _LINK,
        ),
        Mutant(
            "a deadline is on the clock of the other host",
            "cluster/job_fields.py",
            "now + fields.deadline_in_s",
            "fields.deadline_in_s",
            _LINK,
        ),
        Mutant(
            "workers that lost a job are named to the owner",
            "cluster/job_fields.py",
            "replace(job.route, avoid=()) if job.route.avoid else job.route",
            "job.route",
            _LINK,
        ),
        Mutant(
            "what the owner gives up is tried again by the ingress",
            "cluster/job_fields.py",
            "    error.can_failover = False\n",
            "",
            _LINK,
        ),
        Mutant(
            "a frame waits for bytes that have arrived",
            "cluster/link.py",
            "        if self._received < self._needed:",
            "        if self._received <= self._needed:",
            _LINK,
        ),
        Mutant(
            "every message is a frame of its own",
            "cluster/link.py",
            "        if self._outbox_bytes >= BATCH_BYTES and not self._is_paused:",
            "        if not self._is_paused:",
            _LINK,
        ),
        Mutant(
            "a silent peer stays connected",
            "cluster/link.py",
            "        if now - self._received_at > SILENCE_TIMEOUT_S:",
            "        if now - self._received_at > 1e9:",
            _LINK,
        ),
        Mutant(
            "tokens before a resume point are counted twice",
            "workers/remote/open_jobs.py",
            "usage.output_tokens - opened.resumed_tokens",
            "usage.output_tokens",
            _LINK,
        ),
        Mutant(
            "a lost owner leaves no resume point",
            "workers/remote/open_jobs.py",
            "            point = None if opened.tracker is None else opened.tracker.resume_point()",
            "            point = None",
            _CONTRACT,
        ),
        Mutant(
            "ids of a stream are forgotten",
            "workers/remote/resume_tracker.py",
            "            self._output_ids += token_ids",
            "            self._output_ids = list(token_ids)",
            _CONTRACT,
        ),
        Mutant(
            "a resumed stream begins anew",
            "dispatch/lifecycle.py",
            "        stream.begin_attempt(attempt, from_start=is_void)",
            "        stream.begin_attempt(attempt, from_start=True)",
            ("tests/cluster/test_ingress_gateway.py",),
        ),
        Mutant(
            "readers of a shared execution see token ids",
            "streams/fan_out.py",
            "    return delta if payload.keeps_ids or _ASKS_FOR_IDS in payload.body else _stripped(delta)",
            "    return delta",
            _SCHEDULING,
        ),
        Mutant(
            "a replayed answer has token ids",
            "streams/fan_out.py",
            "        return _stripped(delta) if self._keeps_ids and _ASKS_FOR_IDS not in body else delta",
            "        return delta",
            _SCHEDULING,
        ),
        Mutant(
            "lanes with groups find no remote worker",
            "scheduling/placement/route_filter.py",
            "        groups = None if self.is_remote or self.key.overflow else self._rules.groups",
            "        groups = self._rules.groups",
            _SCHEDULING,
        ),
        Mutant(
            "jobs are held before a remote worker",
            "scheduling/batching/batching_window.py",
            " or queue.route.is_remote:",
            ":",
            _SCHEDULING,
        ),
        Mutant(
            "two processes end a job at its deadline",
            "dispatch/deadlines.py",
            "            self._forget(attempt.job.job_id)  # the process that runs the job ends it in time\n"
            "            return\n",
            "            self._forget(attempt.job.job_id)\n",
            _SCHEDULING,
        ),
        Mutant(
            "a plan is sent without a lease",
            "workers/leased.py",
            "        if self.may_send():",
            "        if self.may_send() or plan:",
            _ROLES,
        ),
        Mutant(
            "a gateway between two owners has no models",
            "cli/cluster_wiring.py",
            "            self._served(models, link, was_up=True)",
            "            pass",
            _ROLES,
        ),
        Mutant(
            "streams are not prepared for the loss of the owner",
            "dispatch/pool.py",
            "            if view.is_remote:\n                worker_count",
            "            if not supervisor:\n                worker_count",
            _LOST,
        ),
        Mutant(
            "a forwarded response closes the client's connection",
            "ingress/forwarding.py",
            '            lines = lines.replace(_CLOSE, b"")',
            "            lines = bytes(lines)",
            _PROCESSES,
        ),
        Mutant(
            "a new key is refused until the next poll",
            "ingress/forwarding.py",
            "                error.__traceback__ = None  # its frames refer to the request\n",
            "                request.problem = error\n                return False\n",
            _PROCESSES,
        ),
        Mutant(
            "an ingress process shares repeated calls by itself",
            "dispatch/singleflight/single_flight.py",
            "            return self._sharing.repeats",
            "            return True",
            _PROCESSES,
        ),
        Mutant(
            "a dead process is not restarted",
            "cli/processes.py",
            "        child.restart_at = now + child.delay_s",
            "        child.restart_at = None",
            _LOST,
        ),
    ),
)
