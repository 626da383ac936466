"""Reports and the diagnosis of the running gateway. Part of the composition root."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from inferry.admission.quota_gate import QuotaGate
from inferry.cli.observation_wiring import Observation
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.tenants import TenantWatcher
from inferry.domain.callers import Caller
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.reports import run_budgets
from inferry.domain.tenants import Tenant
from inferry.domain.traffic import Traffic
from inferry.ingress.admin_diagnosis import AdminDiagnosis
from inferry.ingress.admin_reports import AdminReports
from inferry.ingress.app import App
from inferry.ledger.queries import LedgerQueries
from inferry.observe.diagnosis.admission import LIMITS_OF_CODE
from inferry.observe.diagnosis.diagnose import diagnose
from inferry.observe.diagnosis.facts import Facts, LimitedTenant, LiveState, WorkerStatus
from inferry.observe.diagnosis.findings import Diagnosis
from inferry.observe.diagnosis.gather import gather

log = logging.getLogger(__name__)

SLOW_READER_BYTES = 16 * 1024
"""Unread bytes from which the reader of a stream counts as slow."""
TRAFFIC_VALID_S = 2.0
"""The ledger is read at most this often, however many terminals watch."""
MAX_LIMITED = 100
"""Tenants near a limit that a diagnosis looks at, the nearest first."""
NEAR_LIMIT = 0.5


class Diagnostics:
    """Gathers facts on the event loop, and traffic from the ledger in a thread."""

    def __init__(
        self,
        observation: Observation,
        gateway: Gateway,
        pool: Pool,
        gate: QuotaGate,
        tenants: TenantWatcher,
        lanes: Mapping[Lane, LanePolicy],
        open_reader: Callable[[], LedgerQueries | None],
        prices: Mapping[str, Price],
    ) -> None:
        self._history = observation.history
        self._alerts = observation.alerting.report
        self._gateway = gateway
        self._pool = pool
        self._gate = gate
        self._tenants = tenants
        self.lanes = lanes
        self._open_reader = open_reader
        self._prices = prices
        self._reading = asyncio.Lock()
        self._traffic: Traffic | None = None
        self._read_for: tuple[float, float] = (0.0, -TRAFFIC_VALID_S)

    def mount(self, app: App) -> None:
        """Serve `/admin/reports` and `/admin/diagnosis`."""
        watcher = self._tenants
        app.mount_admin(
            lambda refuse, fail: AdminReports(
                refuse,
                fail,
                self._open_reader,
                lambda: run_budgets(watcher.directory.tenants.values()),
                self._prices,
                self._gateway.wall,
            )
        )
        app.mount_admin(lambda refuse, fail: AdminDiagnosis(refuse, fail, self.diagnose))

    async def diagnose(self, window_s: float) -> Diagnosis:
        """The diagnosis of the last seconds."""
        facts = await self.gather(window_s)
        firing = sum(alert["state"] == "firing" for alert in self._alerts())
        return diagnose(facts, self._gateway.wall(), firing)

    async def gather(self, window_s: float) -> Facts:
        """The facts of the last seconds."""
        async with self._reading:
            traffic = await self._recent_traffic(window_s)
        running, tenants, slow, unread = _in_flight(self._gateway)
        return gather(
            self._history,
            window_s,
            lanes=self.lanes,
            workers=self._workers(),
            live=LiveState(running=running, slow_streams=slow, unread_bytes=unread),
            limited=self._limited(window_s, tenants),
            traffic=traffic,
        )

    async def _recent_traffic(self, window_s: float) -> Traffic | None:
        now = self._gateway.now()
        window, read_at = self._read_for
        if window != window_s or now - read_at >= TRAFFIC_VALID_S:
            self._traffic = await asyncio.to_thread(self._read_traffic, self._gateway.wall(), window_s)
            self._read_for = (window_s, now)
        return self._traffic

    def _read_traffic(self, until: float, window_s: float) -> Traffic | None:
        reader = self._open_reader()
        if reader is None:
            return None
        try:
            return reader.traffic(until - window_s, until)
        except Exception as error:
            # A diagnosis is wanted most while something fails: without the ledger it has the metrics.
            log.warning("the diagnosis could not read the ledger: %s", type(error).__name__)
            return None
        finally:
            reader.close()

    def _workers(self) -> list[WorkerStatus]:
        views = {view.worker: view for view in self._pool.views()}
        return [
            WorkerStatus(view=views[one.name], kind=one.kind, drained=one.drained, breaker=one.breaker)
            for one in self._pool.report()
            if one.name in views
        ]

    def _limited(self, window_s: float, running: Mapping[str, int]) -> list[LimitedTenant]:
        """Tenants that have used half or more of a limit, where limits have refused calls. Else the look at every
        tenant is spared."""
        history = self._history
        if not any(history.increase("inferry_errors_total", window_s, code=code) for code in LIMITS_OF_CODE):
            return []
        now = self._gateway.now()
        found = [
            LimitedTenant(tenant=tenant.name, limit=limit, value=value, used_ratio=used_ratio)
            for tenant in self._tenants.directory.tenants.values()
            for limit, value, used_ratio in _used_limits(self._gate, tenant, running.get(tenant.name, 0), now)
            if used_ratio >= NEAR_LIMIT
        ]
        return sorted(found, key=lambda one: -one.used_ratio)[:MAX_LIMITED]


def _in_flight(gateway: Gateway) -> tuple[Counter[str], Counter[str], int, int]:
    """Jobs on workers by lane, jobs by tenant, streams whose reader is behind, and by how many bytes."""
    lanes: Counter[str] = Counter()
    tenants: Counter[str] = Counter()
    slow = unread = 0
    for stream in gateway.streams():
        job = stream.attempt.job
        tenants[job.tenant] += 1
        if stream.attempt.sent_at is not None:
            lanes[job.lane.name] += 1
        if stream.unread_bytes >= SLOW_READER_BYTES:
            slow += 1
            unread += stream.unread_bytes
    return lanes, tenants, slow, unread


def _used_limits(gate: QuotaGate, tenant: Tenant, running: int, now: float) -> Iterable[tuple[str, float, float]]:
    """(limit, value, used part) of the tenant's limits. How much KV and runs have used is not known here: it counts as
    all."""
    limits = tenant.limits
    if limits.max_concurrent is not None:
        yield "max_concurrent", limits.max_concurrent, running / max(1, limits.max_concurrent)
    status = gate.rate_limit_status(Caller(tenant), now)
    if status is not None:
        for name, limit, left in (
            ("requests_per_minute", status.request_limit, status.requests_left),
            ("tokens_per_minute", status.token_limit, status.tokens_left),
        ):
            if limit is not None and left is not None:
                yield name, limit, 1.0 - max(0, left) / max(1, limit)
    for account in gate.report(tenant.name):
        if account.key_id is None and account.token_ceiling:
            yield f"{account.kind}_token_ceiling", account.token_ceiling, account.spent_tokens / account.token_ceiling
        if account.key_id is None and account.nano_ceiling:
            money = account.nano_ceiling / NANOS_PER_UNIT
            yield f"{account.kind}_money_ceiling", money, account.spent_nanos / account.nano_ceiling
    for name in (
        *("run_token_ceiling", "run_money_ceiling"),
        *("max_concurrent_runs", "max_kv_tokens", "run_max_kv_tokens"),
    ):
        if (value := getattr(limits, name)) is not None:
            yield name, value, 1.0
