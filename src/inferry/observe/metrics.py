"""What the gateway counts, for Prometheus. `metric_table` is the only place where a metric is declared.

One event loop owns a `Metrics`: it calls every method, and renders. Counters and histograms follow the job events,
without locks; states (queue depths, workers) are read at scrape time through the callables given to `watch`. Label
values are bounded: lanes, outcomes, reasons and codes are enumerations of the domain, models and workers come from the
configuration, and all others are counted as "other".
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.workers import Phase, WorkerView
from inferry.observe.counters import FastHistogram
from inferry.observe.decision_metrics import DecisionMetrics
from inferry.observe.history import SeriesReading
from inferry.observe.metric_families import Counters, Histograms, Rows, exposition_lines, row_readings
from inferry.observe.metric_table import METRIC_TABLE

OTHER = "other"
_SPECS = {spec.name: spec for spec in METRIC_TABLE}


LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    *(f"{period}_{unit}_ceiling" for period in ("run", "day", "month") for unit in ("token", "money")),
)
"""The limits that a call may be refused for, by their names in the configuration."""
BREAKER_STATES = ("closed", "open", "half_open")


class WorkerHealth(NamedTuple):
    """A worker's health: its breaker's state, how often the breaker has opened, the share of its capacity in use, and
    how many of its calls were retried elsewhere for an overdue first token."""

    worker: str
    breaker: str
    opens: int
    share: float
    overdue: int = 0


class _LaneModelSeries:
    """The children that one lane of one model uses, found with one look-up."""

    __slots__ = ("cached", "first_token", "outcomes", "output", "prompt")

    def __init__(self, jobs: Counters, tokens: Counters, first_token: Histograms, lane: Lane, model: str) -> None:
        self.outcomes = {outcome: jobs.at(lane.name, model, outcome.value) for outcome in Outcome}
        self.prompt = tokens.at("prompt", model, lane.name)
        self.cached = tokens.at("cached", model, lane.name)
        self.output = tokens.at("output", model, lane.name)
        self.first_token = first_token.at(lane.name, model)


class Metrics:
    """The gateway's metrics. `registry` holds those of the process.

    Subscribes to all job events. `refused` counts calls that were never admitted.
    """

    def __init__(self, models: Iterable[str], workers: Iterable[str]) -> None:
        self._queue_wait = Histograms("inferry_queue_wait_seconds")
        self._decisions = DecisionMetrics()
        self._batch_size = Histograms("inferry_batch_size")
        self._releases = Counters("inferry_plans_total")
        self._jobs = Counters("inferry_jobs_total")
        self._errors = Counters("inferry_errors_total")
        self._retries = Counters("inferry_attempt_retries_total")
        self._wasted = Counters("inferry_wasted_tokens_total")
        self._tokens = Counters("inferry_tokens_total")
        self._corrected = Counters("inferry_worker_usage_corrections_total")
        self._first_token = Histograms("inferry_time_to_first_token_seconds")
        self._inter_token_latency = Histograms("inferry_inter_token_latency_seconds")
        self._slo_attainment = Counters("inferry_slo_attainment_total")
        self._shared = Counters("inferry_shared_jobs_total")
        self._in_flight = 0
        self._families: dict[str, Counters | Histograms] = {
            family.spec.name: family
            for family in (
                self._queue_wait,
                self._batch_size,
                self._releases,
                self._jobs,
                self._errors,
                self._retries,
                self._wasted,
                self._tokens,
                self._corrected,
                self._first_token,
                self._inter_token_latency,
                self._slo_attainment,
                self._shared,
                *self._decisions.families,
            )
        }

        self._create_series(models, workers)
        self._queue_depths: Callable[[], Mapping[Lane, int]] | None = None
        self._wait_coverage: Callable[[], Mapping[Lane, float]] | None = None
        self._fairness: Callable[[], Mapping[Lane, float]] | None = None
        self._kv_predicted: Callable[[], Mapping[str, int]] = dict
        self._pending_retries: Callable[[], Mapping[Lane, int]] | None = None
        self._shadow_refusals: Callable[[], Mapping[str, int]] | None = None
        self._views: Callable[[], Iterable[WorkerView]] | None = None
        self._health: Callable[[], Iterable[WorkerHealth]] | None = None
        self._gpu_time: Callable[[], tuple[Rows, Rows]] = lambda: ((), ())
        self._watched: dict[str, Callable[[], float]] = {"inferry_jobs_in_flight": lambda: self._in_flight}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def _create_series(self, models: Iterable[str], workers: Iterable[str]) -> None:
        # All series exist from the start: a series that appears with its first event hides it from rate(). "other" is
        # the exception, since it should never appear.
        self._size_of: dict[str, FastHistogram] = {}
        for worker in workers:
            self.register_worker(worker)
        self._wait_of = [self._queue_wait.at(lane.name) for lane in Lane]
        self._inter_token_latency_of = [self._inter_token_latency.at(lane.name) for lane in Lane]
        self._release_of = {reason: self._releases.at(reason.value) for reason in ReleaseReason}
        self._slo_attainment_of = {
            (lane, attained): self._slo_attainment.at(lane.name, str(attained).lower())
            for lane in Lane
            for attained in (True, False)
        }
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
            self._corrected.at(worker)
            self._decisions.register_worker(worker)

    def remove_worker(self, worker: str) -> None:
        """A worker that is gone, with all its series: names may come and go without end."""
        if self._size_of.pop(worker, None) is not None:
            self._batch_size.drop(worker)
            self._corrected.drop(worker)
            self._decisions.remove_worker(worker)

    # -- events ------------------------------------------------------------------------------------------------------

    def queued(self, attempt: Attempt, now: float) -> None:
        self._in_flight += 1

    def sent(self, attempt: Attempt, now: float) -> None:
        job, plan = attempt.job, attempt.plan
        if attempt.decision is not None:
            self._decisions.sent(job.lane, attempt.decision)
        self._wait_of[job.lane].observe(now - job.arrived_at)
        if plan is not None and plan.jobs[0].job_id == job.job_id:  # once per plan
            sizes = self._size_of.get(plan.worker) or self._batch_size.at(OTHER)
            sizes.observe(len(plan.jobs))
            self._release_of[plan.reason].value += 1

    def first_token(self, attempt: Attempt, now: float) -> None:
        job = attempt.job
        if job.resume_point is None:
            self._series(job).first_token.observe(now - job.arrived_at)

    def produced(self, attempt: Attempt, now: float) -> None:
        last = attempt.last_token_at
        if last is not None:
            self._inter_token_latency_of[attempt.job.lane].observe(now - last)

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
        if entry.outcome is not Outcome.DONE:
            resumed = attempt.resumed
            wasted = entry.prompt_tokens - entry.cached_tokens + (0 if resumed else entry.output_tokens)
            self._wasted_by[entry.outcome, job.lane].value += max(0, wasted)
            if resumed is not None:
                self._retries.at(entry.error_code or OTHER, str(resumed).lower()).value += 1
            elif entry.error_code is not None:
                self.refused(entry.error_code)
        elif attempt.slo_attained is not None:
            self._slo_attainment_of[job.lane, attempt.slo_attained].value += 1

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
        self._at(entry.model, Lane[entry.lane]).outcomes[entry.outcome].value += 1
        if entry.error_code is not None and entry.outcome is not Outcome.DONE:
            self.refused(entry.error_code)

    def unshared(self) -> None:
        """A job that shared an execution gets one of its own."""
        self._in_flight -= 1

    def refused(self, code: str) -> None:
        """A call was refused or failed with this public error code."""
        child = self._error_of.get(code) or self._errors.at(OTHER)
        child.value += 1

    def watch(
        self,
        queue_depths: Callable[[], Mapping[Lane, int]] | None = None,
        views: Callable[[], Iterable[WorkerView]] | None = None,
        *,
        health: Callable[[], Iterable[WorkerHealth]] | None = None,
        open_streams: Callable[[], int] | None = None,
        merged_deltas: Callable[[], int] | None = None,
        ledger_up: Callable[[], float] | None = None,
        ledger_written: Callable[[], int] | None = None,
        ledger_dropped: Callable[[], int] | None = None,
        wait_coverage: Callable[[], Mapping[Lane, float]] | None = None,
        output_error: Callable[[], float] | None = None,
        pending_retries: Callable[[], Mapping[Lane, int]] | None = None,
        fairness: Callable[[], Mapping[Lane, float]] | None = None,
        kv_predicted: Callable[[], Mapping[str, int]] | None = None,
        queued_bytes: Callable[[], int] | None = None,
        shadow_refusals: Callable[[], Mapping[str, int]] | None = None,
        overrun_tokens: Callable[[], int] | None = None,
        gpu_time: Callable[[], tuple[Rows, Rows]] | None = None,
    ) -> None:
        """Where to read states at scrape time. Replaces the readers given and leaves the others."""
        self._queue_depths = queue_depths or self._queue_depths
        self._views = views or self._views
        self._wait_coverage = wait_coverage or self._wait_coverage
        self._health = health or self._health
        self._pending_retries = pending_retries or self._pending_retries
        self._fairness = fairness or self._fairness
        self._kv_predicted = kv_predicted or self._kv_predicted
        self._shadow_refusals = shadow_refusals or self._shadow_refusals
        self._gpu_time = gpu_time or self._gpu_time
        for name, read in (
            ("inferry_open_streams", open_streams),
            ("inferry_merged_deltas_total", merged_deltas),
            ("inferry_ledger_up", ledger_up),
            ("inferry_ledger_entries_written_total", ledger_written),
            ("inferry_ledger_entries_dropped_total", ledger_dropped),
            ("inferry_output_prediction_log_error", output_error),
            ("inferry_queued_bytes", queued_bytes),
            ("inferry_budget_overrun_tokens_total", overrun_tokens),
        ):
            if read is not None:
                self._watched[name] = read

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
            found += row_readings(_SPECS[name], rows)
        return found

    def _pull(self) -> dict[str, Rows]:
        rows: dict[str, Rows] = {name: [((), read())] for name, read in self._watched.items()}
        if self._queue_depths is not None:
            depths = self._queue_depths()
            rows["inferry_queue_depth"] = [((lane.name,), depths.get(lane, 0)) for lane in Lane]
        if self._wait_coverage is not None:
            held = self._wait_coverage()
            rows["inferry_wait_prediction_coverage_ratio"] = [((lane.name,), part) for lane, part in held.items()]
        if self._pending_retries is not None:
            retries = self._pending_retries()
            rows["inferry_pending_retries"] = [((lane.name,), retries.get(lane, 0)) for lane in Lane]
        if self._fairness is not None:
            rows["inferry_fairness_index"] = [((lane.name,), index) for lane, index in self._fairness().items()]
        if self._shadow_refusals is not None:
            by_limit = dict.fromkeys(LIMITS, 0) | dict(self._shadow_refusals())
            rows["inferry_shadow_refusals_total"] = [((limit,), count) for limit, count in by_limit.items()]
        rows["inferry_gpu_seconds_total"], rows["inferry_worker_gpu_utilization_ratio"] = self._gpu_time()
        return rows | self._worker_rows()

    def _series(self, job: InferenceJob) -> _LaneModelSeries:
        return self._at(job.route.model, job.lane)

    def _at(self, model: str, lane: Lane) -> _LaneModelSeries:
        lanes = self._models.get(model)
        if lanes is None:
            lanes = self._models.get(OTHER)
            if lanes is None:
                lanes = self._models[OTHER] = self._lanes_of(OTHER)
        return lanes[lane]

    def _lanes_of(self, model: str) -> list[_LaneModelSeries]:
        return [_LaneModelSeries(self._jobs, self._tokens, self._first_token, lane, model) for lane in Lane]

    def _worker_rows(self) -> dict[str, Rows]:
        """Gauges of all workers; a configured worker without a view is down."""
        up = dict.fromkeys(self._size_of, 0.0)
        phases: dict[tuple[str, ...], float] = {}
        running: dict[str, float] = {}
        waiting: dict[str, float] = {}
        used: dict[str, float] = {}
        capacity: dict[str, float] = {}
        predicted: dict[str, float] = {}
        for worker, tokens in self._kv_predicted().items():
            _add(predicted, worker if worker in self._size_of else OTHER, tokens)
        for view in self._views() if self._views is not None else ():
            # Several unknown workers share one label, and so one sum.
            name = view.worker if view.worker in self._size_of else OTHER
            _add(up, name, view.phase in (Phase.READY, Phase.DRAINING))
            for phase in Phase:
                key = (name, phase.value)
                phases[key] = phases.get(key, 0.0) + (phase is view.phase)
            _add(running, name, view.load.running)
            _add(waiting, name, view.load.waiting)
            _add(used, name, view.load.kv_tokens)
            if view.kv_capacity is not None:
                _add(capacity, name, view.kv_capacity)
        return {
            "inferry_worker_up": _by_worker(up),
            "inferry_worker_phase": phases.items(),
            "inferry_worker_running_sequences": _by_worker(running),
            "inferry_worker_waiting_sequences": _by_worker(waiting),
            "inferry_worker_kv_used_tokens": _by_worker(used),
            "inferry_worker_kv_predicted_tokens": _by_worker(predicted),
            "inferry_worker_kv_capacity_tokens": _by_worker(capacity),
        } | self._breaker_rows()

    def _breaker_rows(self) -> dict[str, Rows]:
        known = [one for one in self._health() if one.worker in self._size_of] if self._health is not None else []
        return {
            "inferry_worker_breaker_state": [
                ((one.worker, state), float(one.breaker == state)) for one in known for state in BREAKER_STATES
            ],
            "inferry_worker_breaker_opens_total": [((one.worker,), float(one.opens)) for one in known],
            "inferry_worker_capacity_share": [((one.worker,), one.share) for one in known],
            "inferry_hedged_retries_total": [((one.worker,), float(one.overdue)) for one in known],
        }


def _add(totals: dict[str, float], name: str, value: float) -> None:
    totals[name] = totals.get(name, 0.0) + value


def _by_worker(totals: Mapping[str, float]) -> Rows:
    return [((name,), value) for name, value in totals.items()]


def _error_codes() -> set[str]:
    codes, todo = set(), [GatewayError]
    while todo:
        error = todo.pop()
        codes.add(error.code)
        todo.extend(error.__subclasses__())
    return codes
