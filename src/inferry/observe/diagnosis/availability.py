"""Rules about parts that do not work: workers, the ledger, the gateway's own process."""

from inferry.observe.diagnosis.facts import Facts, WorkerFacts
from inferry.observe.diagnosis.findings import Evidence, Finding, Setting
from inferry.observe.diagnosis.pressure import ratio

LOST_RATIO = 0.05
MAX_LAG_MS = 50.0
_LOST = ("worker_lost", "worker_timeout", "no_worker")


def dead_worker(facts: Facts) -> Finding | None:
    """A worker is down, or loses calls."""
    broken = [worker for worker in facts.workers if not worker.drained and _is_broken(worker)]
    lost = sum(facts.errors.get(code, 0) for code in _LOST) + facts.retries
    if not broken and lost > facts.errors.get("no_worker", 0):
        # It was lost with its calls and is up again, too soon for its circuit breaker to open. One that was not up
        # when the gateway started has lost none.
        broken = [worker for worker in facts.workers if worker.up_ratio is not None and worker.up_ratio < 1.0]
    if not broken:
        failing = [one for one in facts.workers if one.traffic is not None and one.traffic.failed]
        if not failing or ratio(lost, facts.calls) < LOST_RATIO:
            return None
        broken = [max(failing, key=lambda one: one.traffic.failed if one.traffic else 0)]
    worker = broken[0]
    up = sum(_serves(one) for one in facts.workers)
    return Finding(
        cause="dead_worker",
        stage="worker",
        where=f"worker {worker.worker}",
        summary=f"Worker {worker.worker} is {_state(worker)}; {up} of {len(facts.workers)} workers serve.",
        evidence=(
            Evidence(f"time worker {worker.worker} was up", worker.up_ratio or 0.0, "ratio", 1.0),
            Evidence(f"times its circuit breaker opened ({worker.breaker} now)", worker.opens, "times"),
            Evidence("calls lost by workers, retried ones included", lost, "calls"),
        ),
        setting=Setting("action", f"keep another worker up while {worker.worker} restarts", "and find out why it did")
        if _is_back(worker)
        else Setting("action", f"restart the engine of worker {worker.worker}", "or remove it from `workers`"),
    )


def drained_workers(facts: Facts) -> Finding | None:
    """Nothing is left to send calls to, because an operator drained it."""
    drained = [worker for worker in facts.workers if worker.drained]
    if not drained or len(drained) < len(facts.workers):
        return None
    return Finding(
        cause="drained_workers",
        stage="worker",
        where=f"worker {drained[0].worker}",
        summary="Every worker is drained; no call is sent.",
        evidence=(Evidence("drained workers", len(drained), "workers", len(facts.workers)),),
        setting=Setting("action", "inferry workers readmit", drained[0].worker),
    )


def ledger_lost(facts: Facts) -> Finding | None:
    if facts.ledger_up is not False and not facts.ledger_dropped:
        return None
    return Finding(
        cause="ledger_down",
        stage="gateway",
        where="ledger",
        summary="The ledger's database is not usable; rows wait or are lost.",
        evidence=(
            Evidence("ledger entries dropped", facts.ledger_dropped, "entries", 0),
            Evidence("database usable (1) or not (0)", 1.0 if facts.ledger_up else 0.0, "", 1.0),
        ),
        setting=Setting("action", "restore the database that `ledger` names", "and check its disk"),
    )


def gateway_busy(facts: Facts) -> Finding | None:
    """The event loop of the gateway is late, so every stream is."""
    lag_ms = facts.loop_lag_p99_ms
    if lag_ms is None or lag_ms < MAX_LAG_MS:
        return None
    return Finding(
        cause="gateway_busy",
        stage="gateway",
        where="event loop",
        summary="The gateway's process has too little CPU; all tokens are late.",
        evidence=(
            Evidence("p99 delay of the event loop", lag_ms, "ms", MAX_LAG_MS),
            Evidence("calls per second", facts.calls_per_s, "calls/s"),
        ),
        setting=Setting("action", "give the gateway a CPU core of its own", "and serve the compiled build"),
    )


def _serves(worker: WorkerFacts) -> bool:
    return worker.phase == "ready" and worker.breaker == "closed"


def _is_back(worker: WorkerFacts) -> bool:
    """Whether the worker was taken out after failures, and serves again."""
    return _serves(worker) and (worker.opens > 0 or (worker.up_ratio is not None and worker.up_ratio < 1.0))


def _is_broken(worker: WorkerFacts) -> bool:
    if worker.phase in ("down", "starting") or worker.breaker != "closed":
        return True
    return worker.opens > 0


def _state(worker: WorkerFacts) -> str:
    if worker.phase != "ready":
        return worker.phase
    if worker.breaker != "closed":
        return f"up with its circuit breaker {worker.breaker}"
    return "up again after it failed" if _is_back(worker) else "losing calls"
