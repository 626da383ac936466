"""What the gateway counts, for Prometheus. `metric_table` is the only place where a metric is declared.

One event loop owns a `Metrics`: it calls every method, and renders. Counters and histograms follow the job events,
without locks; states (queue depths, workers) are read at scrape time (`watched_states`, `worker_states`). Label values
are bounded: lanes, outcomes, reasons and codes are enumerations of the domain, models and workers come from the
configuration, and all others are counted as "other". No metric has tenants, runs or keys as labels.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.plans import BatchPlan
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.observe.counters import FastCounter, FastHistogram, TickStatistics
from inferry.observe.decision_metrics import DecisionMetrics
from inferry.observe.history import SeriesReading
from inferry.observe.metric_families import SPECS, Counters, Histograms, Rows, exposition_lines, row_readings
from inferry.observe.metric_table import METRIC_TABLE
from inferry.observe.request_counts import STATUS_CLASSES, RequestCounts
from inferry.observe.tenant_service import TenantService
from inferry.observe.watched_states import Read, WatchedStates
from inferry.observe.worker_states import OTHER, WorkerStates

_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64)
BATCH_SIZES = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+", "unknown")
"""Values of the label `batch`."""
_UNKNOWN_BATCH: Final = len(BATCH_SIZES) - 1


class _LaneModelSeries:
    """The children that one lane of one model uses, found with one look-up."""

    __slots__ = (
        *("attained", "by_batch", "cached", "cost", "e2e", "first_token", "gaps", "missed"),
        *("outcomes", "output", "prompt", "queue_wait"),
    )

    def __init__(
        self,
        jobs: Counters,
        tokens: Counters,
        cost: Counters,
        attainment: Counters,
        queue_wait: Histograms,
        first_token: Histograms,
        gaps: Histograms,
        e2e: Histograms,
        lane: Lane,
        model: str,
    ) -> None:
        self.outcomes = {outcome: jobs.at(lane.name, model, outcome.value) for outcome in Outcome}
        self.prompt = tokens.at("prompt", model, lane.name)
        self.cached = tokens.at("cached", model, lane.name)
        self.output = tokens.at("output", model, lane.name)
        self.cost = cost.at(model, lane.name)
        self.attained = attainment.at(lane.name, model, "true")
        self.missed = attainment.at(lane.name, model, "false")
        self.queue_wait = queue_wait.at(lane.name, model)
        self.first_token = first_token.at(lane.name, model)
        self.gaps = gaps.at(lane.name, model)
        self.e2e = e2e.at(lane.name, model)
        # First tokens and ends by size of the engine's batch; empty until a job of the lane and model is sent.
        self.by_batch: list[tuple[FastHistogram, FastHistogram]] = []


class Metrics:
    """The gateway's metrics. `registry` holds those of the process.

    Subscribes to all job events. `refused` counts calls that were never admitted. `workers` and `states` are read at
    scrape time; `ticks`, `loop_lag` and `requests` are counted by the dispatch loop, by a timer and by the server.
    """

    def __init__(self, models: Iterable[str], workers: Iterable[str]) -> None:
        self._families: dict[str, Counters | Histograms] = {}
        self._decisions = DecisionMetrics()
        for family in self._decisions.families:
            self._families[family.spec.name] = family
        self._queue_wait = self._histograms("inferry_queue_wait_seconds")
        self._batch_size = self._histograms("inferry_batch_size")
        self._releases = self._counters("inferry_plans_total")
        self._jobs = self._counters("inferry_jobs_total")
        self._errors = self._counters("inferry_errors_total")
        self._retries = self._counters("inferry_attempt_retries_total")
        self._wasted = self._counters("inferry_wasted_tokens_total")
        self._tokens = self._counters("inferry_tokens_total")
        self._corrected = self._counters("inferry_worker_usage_corrections_total")
        self._first_token = self._histograms("inferry_time_to_first_token_seconds")
        self._inter_token_latency = self._histograms("inferry_inter_token_latency_seconds")
        self._slo_attainment = self._counters("inferry_slo_attainment_total")
        self._shared = self._counters("inferry_shared_jobs_total")
        self._in_flight = 0
        self._padded = self._counters("inferry_padded_prompt_tokens_total")
        self._padding = self._counters("inferry_padding_tokens_total")
        self._e2e = self._histograms("inferry_e2e_latency_seconds")
        self._first_token_by_batch = self._histograms("inferry_time_to_first_token_by_batch_seconds")
        self._e2e_by_batch = self._histograms("inferry_e2e_latency_by_batch_seconds")
        self._cost = self._counters("inferry_cost_total")
        self._requests = self._counters("inferry_http_requests_total")
        self._tick_seconds = self._histograms("inferry_tick_seconds")
        self._tick_jobs = self._histograms("inferry_tick_jobs")
        self._loop_lag = self._histograms("inferry_event_loop_lag_seconds")
        self.tenants = TenantService()
        self._create_series(models, workers)
        self.ticks = TickStatistics(self._tick_seconds.at(), self._tick_jobs.at())
        self.requests = RequestCounts({})
        self.workers = WorkerStates(self._size_of)
        self._states = WatchedStates()
        self.watch({"inferry_jobs_in_flight": lambda: self._in_flight})
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def _counters(self, name: str) -> Counters:
        family = self._families[name] = Counters(name)
        return family

    def _histograms(self, name: str) -> Histograms:
        family = self._families[name] = Histograms(name)
        return family

    def _create_series(self, models: Iterable[str], workers: Iterable[str]) -> None:
        # All series exist from the start: a series that appears with its first event hides it from rate(). "other" is
        # the exception, since it should never appear; and latencies by batch size, of which there are many, exist from
        # the first job that is sent in their lane and model.
        self._size_of: dict[str, FastHistogram] = {}
        self._padding_of: dict[str, tuple[FastCounter, FastCounter]] = {}
        for worker in workers:
            self.register_worker(worker)
        self._release_of = {reason: self._releases.at(reason.value) for reason in ReleaseReason}
        self._models = {model: self._lanes_of(model) for model in models}
        for code in ("worker_lost", "worker_timeout", "no_worker", "preempted"):
            for resumed in ("true", "false"):
                self._retries.at(code, resumed)
        self._wasted_by = {
            (outcome, lane): self._wasted.at(outcome.value, lane.name)
            for outcome in Outcome
            if outcome is not Outcome.DONE
            for lane in Lane
        }
        self._shared_of = {kind: self._shared.at(kind) for kind in ("identical", "joined", "replayed")}
        self._error_of = {code: self._errors.at(code) for code in _error_codes()}

    def register_models(self, models: Iterable[str]) -> None:
        """Models that a configured worker has said it serves; their number is bounded by the operators' own servers."""
        for model in models:
            if model not in self._models:
                self._models[model] = self._lanes_of(model)

    def register_worker(self, worker: str) -> None:
        """A worker that an operator has added."""
        if worker not in self._size_of:
            self._size_of[worker] = self._batch_size.at(worker)
            self._padding_of[worker] = (self._padded.at(worker), self._padding.at(worker))
            self._corrected.at(worker)
            self._decisions.register_worker(worker)

    def remove_worker(self, worker: str) -> None:
        """A worker that is gone, with all its series: names may come and go without end."""
        if self._size_of.pop(worker, None) is not None:
            del self._padding_of[worker]
            for family in (self._batch_size, self._padded, self._padding, self._corrected):
                family.drop(worker)
            self._decisions.remove_worker(worker)

    def serve_endpoints(self, endpoints: Iterable[str]) -> None:
        """Count the requests of these endpoints, and those of all others together."""
        self.requests = RequestCounts(
            {endpoint: [self._requests.at(endpoint, one) for one in STATUS_CLASSES] for endpoint in (*endpoints, OTHER)}
        )

    @property
    def loop_lag(self) -> FastHistogram:
        return self._loop_lag.at()

    # -- events ------------------------------------------------------------------------------------------------------

    def queued(self, attempt: Attempt, now: float) -> None:
        self._in_flight += 1

    def sent(self, attempt: Attempt, now: float) -> None:
        job, plan = attempt.job, attempt.plan
        if attempt.decision is not None:
            self._decisions.sent(job.lane, self._label_of(job.route.model), attempt.decision)
        of = self._series(job)
        of.queue_wait.observe(now - job.arrived_at)
        if not of.by_batch:
            self._create_by_batch(job, of)
        if plan is not None and plan.jobs[0].job_id == job.job_id:  # once per plan
            sizes = self._size_of.get(plan.worker) or self._batch_size.at(OTHER)
            sizes.observe(len(plan.jobs))
            self._release_of[plan.reason].value += 1
            if plan.padded_tokens is not None:
                self._count_padding(plan, plan.padded_tokens)

    def _count_padding(self, plan: BatchPlan, padded_tokens: int) -> None:
        """Each prompt of the plan is padded to `padded_tokens`."""
        tokens = sum(job.footprint.prompt.expected for job in plan.jobs)
        children = self._padding_of.get(plan.worker) or (self._padded.at(OTHER), self._padding.at(OTHER))
        children[0].value += tokens
        children[1].value += padded_tokens * len(plan.jobs) - tokens

    def first_token(self, attempt: Attempt, now: float) -> None:
        job = attempt.job
        if job.resume_point is None and job.route.role != "prefill":
            self._series(job).first_token.observe(now - job.arrived_at)

    def produced(self, attempt: Attempt, now: float) -> None:
        last = attempt.last_token_at
        if last is not None:
            gaps = attempt.gap_counts
            if not isinstance(gaps, FastHistogram):
                gaps = attempt.gap_counts = self._series(attempt.job).gaps
            gaps.observe(now - last)

    def ended(self, attempt: Attempt, now: float) -> None:
        self._in_flight -= 1
        # The entry that the ledger keeps, so that the two never disagree.
        entry = attempt.ledger_entry
        assert entry is not None, "an ended attempt has a ledger entry"
        job = attempt.job
        of = self._series(job)
        of.outcomes[entry.outcome].value += 1
        of.prompt.value += entry.prompt_tokens
        of.cached.value += entry.cached_tokens
        of.output.value += entry.output_tokens
        if entry.cost_nanos is not None:
            of.cost.value += entry.cost_nanos / NANOS_PER_UNIT
        self.tenants.add(entry.tenant, entry.prompt_tokens + entry.output_tokens, now)
        if entry.outcome is not Outcome.DONE:
            resumed = attempt.resumed
            wasted = entry.prompt_tokens - entry.cached_tokens + (0 if resumed else entry.output_tokens)
            self._wasted_by[entry.outcome, job.lane].value += max(0, wasted)
            if resumed is not None:
                self._retries.at(entry.error_code or OTHER, str(resumed).lower()).value += 1
            elif entry.error_code is not None:
                self.refused(entry.error_code)
            return
        if attempt.slo_attained is not None:
            (of.attained if attempt.slo_attained else of.missed).value += 1
        total_s = now - job.arrived_at
        of.e2e.observe(total_s)
        size = entry.engine_batch
        batch = _UNKNOWN_BATCH if size is None else bisect_left(_BATCH_BOUNDS, round(size))
        if not of.by_batch:
            self._create_by_batch(job, of)
        first_token, e2e = of.by_batch[batch]
        e2e.observe(total_s)
        if attempt.first_token_at is not None:
            first_token.observe(attempt.first_token_at - job.arrived_at)

    # -- other facts -------------------------------------------------------------------------------------------------

    def usage_corrected(self, worker: str) -> None:
        """The worker reported a usage that cannot be true."""
        self._corrected.at(worker if worker in self._size_of else OTHER).value += 1

    def shared(self, kind: str) -> None:
        """A job shares another's execution; `shared_ended` or `unshared` follows."""
        self._shared_of[kind].value += 1
        self._in_flight += 1

    def shared_ended(self, entry: LedgerEntry) -> None:
        """A job that shared an execution has ended with this entry."""
        self._in_flight -= 1
        of = self._at(entry.model, Lane[entry.lane])
        of.outcomes[entry.outcome].value += 1
        of.cost.value += (entry.cost_nanos or 0) / NANOS_PER_UNIT
        if entry.error_code is not None and entry.outcome is not Outcome.DONE:
            self.refused(entry.error_code)

    def unshared(self) -> None:
        """A job that shared an execution gets one of its own."""
        self._in_flight -= 1

    def refused(self, code: str) -> None:
        """A call was refused or failed with this public error code."""
        child = self._error_of.get(code) or self._errors.at(OTHER)
        child.value += 1

    def watch(self, readers: Mapping[str, Read]) -> None:
        """Where to read states at scrape time, by metric. Replaces the readers given and leaves the others."""
        self._states.watch(readers)

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type: every metric of the table in its order, then the registry."""
        # Not through prometheus_client's families: those take ten times as long, and the event loop waits.
        pulled = self._pull()
        lines = []
        for spec in METRIC_TABLE:
            lines.append(f"# HELP {spec.name} {spec.help}")
            lines.append(f"# TYPE {spec.name} {spec.kind}")
            family = self._families.get(spec.name)
            lines += exposition_lines(spec, pulled.get(spec.name, ())) if family is None else family.lines()
        lines.append("")
        return "\n".join(lines).encode() + generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def readings(self) -> list[SeriesReading]:
        """Every series of the table with its present value."""
        found: list[SeriesReading] = []
        for family in self._families.values():
            found += family.readings()
        for name, rows in self._pull().items():
            found += row_readings(SPECS[name], rows)
        return found

    def _pull(self) -> dict[str, Rows]:
        return self._states.rows() | self.workers.rows()

    def _create_by_batch(self, job: InferenceJob, of: _LaneModelSeries) -> None:
        labels = job.lane.name, self._label_of(job.route.model)
        of.by_batch = [
            (self._first_token_by_batch.at(*labels, size), self._e2e_by_batch.at(*labels, size)) for size in BATCH_SIZES
        ]

    def _series(self, job: InferenceJob) -> _LaneModelSeries:
        return self._at(job.route.model, job.lane)

    def by_lane_and_model(self, values: Mapping[tuple[Lane, str], float]) -> dict[tuple[str, ...], float]:
        """The values with zero for every other lane and model: a series must not disappear."""
        found: dict[tuple[str, ...], float] = {(lane.name, model): 0 for model in self._models for lane in Lane}
        for (lane, model), value in values.items():
            key = lane.name, self._label_of(model)
            found[key] = found.get(key, 0) + value
        return found

    def _label_of(self, model: str) -> str:
        return model if model in self._models else OTHER

    def _at(self, model: str, lane: Lane) -> _LaneModelSeries:
        lanes = self._models.get(model)
        if lanes is None:
            lanes = self._models.get(OTHER)
            if lanes is None:
                lanes = self._models[OTHER] = self._lanes_of(OTHER)
        return lanes[lane]

    def _lanes_of(self, model: str) -> list[_LaneModelSeries]:
        self._decisions.register_model(model)
        counters = (self._jobs, self._tokens, self._cost, self._slo_attainment)
        histograms = (self._queue_wait, self._first_token, self._inter_token_latency, self._e2e)
        return [_LaneModelSeries(*counters, *histograms, lane, model) for lane in Lane]


def _error_codes() -> set[str]:
    codes, todo = set(), [GatewayError]
    while todo:
        error = todo.pop()
        codes.add(error.code)
        todo.extend(error.__subclasses__())
    return codes
