"""Decision records, traces and timelines, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_RECORDS = ("tests/scheduling/test_decision_records.py",)
_TRACES = ("tests/observe/test_tracing.py", "tests/e2e/test_traces.py")
_TIMELINE = ("tests/ingress/test_run_timeline.py",)

GROUP = MutantGroup(
    tests=("tests/domain", "tests/observe"),
    mutants=(
        Mutant(
            "a job waits for limits from before it was ready",
            "scheduling/queues/bound_interval.py",
            "seconds[limit] = seconds.get(limit, 0.0) - before_s",
            "pass",
            _RECORDS,
        ),
        Mutant(
            "an empty queue keeps its limit",
            "scheduling/queues/lane_queue.py",
            "            self._single_run = self._fair_queue = None\n            self.bound = None\n",
            "            self._single_run = self._fair_queue = None\n",
            _RECORDS,
        ),
        Mutant(
            "a blocked queue waits for itself",
            "scheduling/selection.py",
            "if queue is not reserved_queue and queue.blocked_in_round != self._round:",
            "if queue is not reserved_queue:",
            _RECORDS,
        ),
        Mutant(
            "a limit is never determined again",
            "scheduling/selection.py",
            "self._rebinds = now >= self._rebind_at",
            "self._rebinds = False",
            _RECORDS,
        ),
        Mutant(
            "a hold is not measured",
            "scheduling/scheduler.py",
            "entry.held_s, entry.ready_at = now - entry.ready_at, now",
            "entry.held_s, entry.ready_at = 0.0, now",
            _RECORDS,
        ),
        Mutant(
            "the reserve of a lane counts as a full worker",
            "scheduling/placement/binding.py",
            "decisions.SEQUENCES if sequences >= worker.sequence_limit else decisions.LANE_RESERVE",
            "decisions.SEQUENCES",
            _RECORDS,
        ),
        Mutant(
            "the client's decision on sampling is ignored",
            "observe/tracing/tracer.py",
            "return trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1)",
            "return trace_id.decode(), span_id.decode(), True",
            _TRACES,
        ),
        Mutant(
            "a retried attempt ends the trace",
            "observe/tracing/tracer.py",
            "if attempt.resumed is None:",
            "if True:",
            _TRACES,
        ),
        Mutant(
            "attempts share a span",
            "domain/tracing.py",
            "self.span_id + FIRST_JOB_SPAN * attempt",
            "self.span_id + FIRST_JOB_SPAN",
            _TRACES,
        ),
        Mutant(
            "the export queue grows without bound",
            "observe/tracing/exporter.py",
            "if waiting_jobs + _jobs_of(call) > self._max_queued or self._closing.is_set():",
            "if self._closing.is_set():",
            _TRACES,
        ),
        Mutant(
            "an error of the client is an error of the server",
            "observe/tracing/tracer.py",
            "error.code, status, error.status >= 500",
            "error.code, status, True",
            _TRACES,
        ),
        Mutant(
            "a timeline shows other tenants",
            "ledger/timeline_queries.py",
            "in_tree = and_(attempts.c.tenant == tenant, attempts.c.run_id.in_",
            "in_tree = and_(attempts.c.run_id.in_",
            _TIMELINE,
        ),
        Mutant(
            "a page begins with the last call of the page before",
            "ledger/timeline_queries.py",
            "attempts.c.attempt > attempt)",
            "attempts.c.attempt >= attempt)",
            _TIMELINE,
        ),
        Mutant(
            "overlapping calls share a track",
            "ingress/run_timeline.py",
            "if busy_until <= start:",
            "if True:",
            _TIMELINE,
        ),
    ),
)
