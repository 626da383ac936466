"""What the gateway counts, for Prometheus. `metric_table` is the only place where a metric is declared.

One event loop owns a `Metrics`: it calls every method, and renders. Facts are pushed as they happen into counters
without locks; states (queue depths, workers) are pulled at scrape time through the callables given to `watch`. Label
values are bounded: lanes, outcomes, reasons and codes are enumerations of the domain, models and workers come from the
configuration, and whatever else turns up is counted as "other".
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
from inferry.domain.plans import BatchPlan
from inferry.domain.workers import Phase, WorkerView
from inferry.observe.counters import FastCounter, FastHistogram
from inferry.observe.metric_table import METRIC_TABLE, MetricSpec

OTHER = "other"


LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    *(f"{period}_{unit}_ceiling" for period in ("run", "day", "month") for unit in ("token", "money")),
)
"""The limits that a call may be refused for, by their names in the configuration."""
BREAKER_STATES = ("closed", "open", "half_open")


class WorkerHealth(NamedTuple):
    """How far a worker is trusted: its breaker's state, how often that has opened, the share of its room in use, and
    how many of its calls were retried elsewhere for an overdue first token."""

    worker: str
    breaker: str
    opens: int
    share: float
    overdue: int = 0


_SPECS = {spec.name: spec for spec in METRIC_TABLE}

Rows = Iterable[tuple[tuple[str, ...], float]]


class _Counters:
    """The children of one counter."""

    def __init__(self, name: str) -> None:
        self.spec = _SPECS[name]
        self._children: dict[tuple[str, ...], FastCounter] = {}

    def at(self, *labels: str) -> FastCounter:
        return self._children.setdefault(labels, FastCounter())

    def drop(self, *labels: str) -> None:
        self._children.pop(labels, None)

    def lines(self) -> list[str]:
        return _lines(self.spec, ((labels, child.value) for labels, child in self._children.items()))


class _Histograms:
    """The children of one histogram."""

    def __init__(self, name: str) -> None:
        self.spec = _SPECS[name]
        self._children: dict[tuple[str, ...], FastHistogram] = {}
        # What stands before each number never changes, so it is written once: a scrape holds up the event loop.
        self._heads: dict[tuple[str, ...], tuple[list[str], str, str]] = {}

    def at(self, *labels: str) -> FastHistogram:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = FastHistogram(self.spec.buckets)
            name, pairs = self.spec.name, _pairs(self.spec.labels, labels)
            bounds = [*(repr(float(bound)) for bound in self.spec.buckets), "+Inf"]
            self._heads[labels] = (
                [f'{name}_bucket{{{pairs},le="{bound}"}} ' for bound in bounds],
                f"{name}_count{{{pairs}}} ",
                f"{name}_sum{{{pairs}}} ",
            )
        return child

    def drop(self, *labels: str) -> None:
        self._children.pop(labels, None)
        self._heads.pop(labels, None)

    def lines(self) -> list[str]:
        lines = []
        for labels, child in self._children.items():
            buckets, count, total = self._heads[labels]
            upto = child.cumulative()
            lines += [f"{head}{number}" for head, number in zip(buckets, upto, strict=True)]
            lines.append(f"{count}{upto[-1]}")
            lines.append(f"{total}{child.total!r}")
        return lines


class _LaneModelSeries:
    """The children that one lane of one model uses, found with one look-up."""

    __slots__ = ("cached", "first_token", "outcomes", "output", "prompt")

    def __init__(self, jobs: _Counters, tokens: _Counters, first_token: _Histograms, lane: Lane, model: str) -> None:
        self.outcomes = {outcome: jobs.at(lane.name, model, outcome.value) for outcome in Outcome}
        self.prompt = tokens.at("prompt", model, lane.name)
        self.cached = tokens.at("cached", model, lane.name)
        self.output = tokens.at("output", model, lane.name)
        self.first_token = first_token.at(lane.name, model)


class Metrics:
    """The gateway's metrics. `registry` holds those of the process, and whatever else somebody wants exported.

    For each attempt, in this order: `offered` when its job is given to the scheduler, `planned` when it is sent,
    `first_token`, any number of `inter_token_latency`, and `ended`. `refused` is for calls that were never let in.
    """

    def __init__(self, models: Iterable[str], workers: Iterable[str]) -> None:
        self._queue_wait = _Histograms("inferry_queue_wait_seconds")
        self._batch_size = _Histograms("inferry_batch_size")
        self._releases = _Counters("inferry_plans_total")
        self._jobs = _Counters("inferry_jobs_total")
        self._errors = _Counters("inferry_errors_total")
        self._retries = _Counters("inferry_attempt_retries_total")
        self._wasted = _Counters("inferry_wasted_tokens_total")
        self._tokens = _Counters("inferry_tokens_total")
        self._corrected = _Counters("inferry_worker_usage_corrections_total")
        self._first_token = _Histograms("inferry_time_to_first_token_seconds")
        self._inter_token_latency = _Histograms("inferry_inter_token_latency_seconds")
        self._slo_attainment = _Counters("inferry_slo_attainment_total")
        self._shared = _Counters("inferry_shared_jobs_total")
        self._in_flight = 0
        self._families: dict[str, _Counters | _Histograms] = {
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
            )
        }

        # Everything that may be counted is there from the start: a series that appears with its first event hides it
        # from rate(). "other" is the exception, since it should never appear.
        self._size_of = {worker: self._batch_size.at(worker) for worker in workers}
        for worker in self._size_of:
            self._corrected.at(worker)
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

        self._queue_depths: Callable[[], Mapping[Lane, int]] | None = None
        self._wait_coverage: Callable[[], Mapping[Lane, float]] | None = None
        self._fairness: Callable[[], Mapping[Lane, float]] | None = None
        self._pending_retries: Callable[[], Mapping[Lane, int]] | None = None
        self._shadow_refusals: Callable[[], Mapping[str, int]] | None = None
        self._views: Callable[[], Iterable[WorkerView]] | None = None
        self._health: Callable[[], Iterable[WorkerHealth]] | None = None
        self._watched: dict[str, Callable[[], float]] = {"inferry_jobs_in_flight": lambda: self._in_flight}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

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

    def remove_worker(self, worker: str) -> None:
        """A worker that is gone, with all its series: names may come and go without end."""
        if self._size_of.pop(worker, None) is not None:
            self._batch_size.drop(worker)
            self._corrected.drop(worker)

    def offered(self, job: InferenceJob) -> None:
        """The job was given to the scheduler; once per attempt."""
        self._in_flight += 1

    def planned(self, plan: BatchPlan, now: float) -> None:
        """The plan was sent to its worker."""
        waits = self._wait_of
        for job in plan.jobs:
            waits[job.lane].observe(now - job.arrived_at)
        sizes = self._size_of.get(plan.worker) or self._batch_size.at(OTHER)
        sizes.observe(len(plan.jobs))
        self._release_of[plan.reason].value += 1

    def first_token(self, attempt: Attempt) -> None:
        """The attempt's first token has come; its time is already noted in the attempt."""
        if attempt.first_token_at is not None:
            job = attempt.job
            self._series(job).first_token.observe(attempt.first_token_at - job.arrived_at)

    def inter_token_latency(self, lane: Lane, seconds: float) -> None:
        """Time between a token of a job and the one before."""
        self._inter_token_latency_of[lane].observe(seconds)

    def ended(
        self,
        attempt: Attempt,
        *,
        has_slo: bool = False,
        entry: LedgerEntry | None = None,
        resumed: bool | None = None,
    ) -> None:
        """The attempt has ended; once per attempt that was offered.

        `has_slo` says that its lane promises a first token and a gap: whether they were kept counts where the attempt
        completed. `entry` is the attempt's account where the caller has it already, so that it is not made twice.
        `resumed` is for attempts whose job goes on: whether from what this one wrote, or from its start.
        """
        self._in_flight -= 1
        # The very account that the ledger keeps, so that the two never disagree.
        account = attempt.entry(0.0) if entry is None else entry
        job = attempt.job
        of = self._series(job)
        of.outcomes[account.outcome].value += 1
        of.prompt.value += account.prompt_tokens
        of.cached.value += account.cached_tokens
        of.output.value += account.output_tokens
        if account.outcome is not Outcome.DONE:
            wasted = account.prompt_tokens - account.cached_tokens + (0 if resumed else account.output_tokens)
            self._wasted_by[account.outcome, job.lane].value += max(0, wasted)
            if resumed is not None:
                self._retries.at(account.error_code or OTHER, str(resumed).lower()).value += 1
            elif account.error_code is not None:
                self.refused(account.error_code)
        elif has_slo:
            self._slo_attainment_of[job.lane, attempt.slo_attained].value += 1

    def usage_corrected(self, worker: str) -> None:
        """The worker reported a usage that cannot be true."""
        self._corrected.at(worker if worker in self._size_of else OTHER).value += 1

    def shared(self, kind: str) -> None:
        """A job gets another's answer; `shared_ended` or `unshared` follows."""
        self._shared_of[kind].value += 1
        self._in_flight += 1

    def shared_ended(self, entry: LedgerEntry) -> None:
        """It has its end, and this is its account."""
        self._in_flight -= 1
        self._at(entry.model, Lane[entry.lane]).outcomes[entry.outcome].value += 1
        if entry.error_code is not None and entry.outcome is not Outcome.DONE:
            self.refused(entry.error_code)

    def unshared(self) -> None:
        """It has an execution of its own instead."""
        self._in_flight -= 1

    def refused(self, code: str) -> None:
        """A call was turned away with this public error code."""
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
        queued_bytes: Callable[[], int] | None = None,
        shadow_refusals: Callable[[], Mapping[str, int]] | None = None,
        overrun_tokens: Callable[[], int] | None = None,
    ) -> None:
        """Where to read what is a state and not an event. Replaces what is given and leaves the rest as it was."""
        self._queue_depths = queue_depths or self._queue_depths
        self._views = views or self._views
        self._wait_coverage = wait_coverage or self._wait_coverage
        self._health = health or self._health
        self._pending_retries = pending_retries or self._pending_retries
        self._fairness = fairness or self._fairness
        self._shadow_refusals = shadow_refusals or self._shadow_refusals
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
            lines += _lines(spec, pulled.get(spec.name, ())) if family is None else family.lines()
        lines.append("")
        return "\n".join(lines).encode() + generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

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
        """Gauges of all workers; one that is configured and not seen is down."""
        up = dict.fromkeys(self._size_of, 0.0)
        phases: dict[tuple[str, ...], float] = {}
        running: dict[str, float] = {}
        waiting: dict[str, float] = {}
        used: dict[str, float] = {}
        capacity: dict[str, float] = {}
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


def _lines(spec: MetricSpec, rows: Rows) -> list[str]:
    if not spec.labels:
        return [f"{spec.name} {value!r}" for _, value in rows]
    return [f"{spec.name}{{{_pairs(spec.labels, labels)}}} {value!r}" for labels, value in rows]


def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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
