"""Monitors one HTTP server: probes, activity of its calls, and the unresponsive state.

Belongs to the worker's event loop.
"""

from collections.abc import Callable, Mapping, Sequence

from inferry.domain.clock import Clock
from inferry.domain.errors import WorkerLost
from inferry.workers.openai_http.calls import Call
from inferry.workers.openai_http.liveness import MISSED_PROBES, Liveness
from inferry.workers.openai_http.liveness_prober import LivenessProber
from inferry.workers.openai_http.metrics_poller import MetricsPoller
from inferry.workers.openai_http.server_queries import ServerQueries


class ServerMonitor:
    """`calls` are the worker's; `on_unresponsive` is called once when the server becomes unresponsive."""

    def __init__(
        self,
        server: ServerQueries,
        calls: Mapping[str, Call],
        clock: Clock,
        timeout_s: float,
        on_unresponsive: Callable[[], None],
    ) -> None:
        self._server = server
        self._calls = calls
        self._now = clock.now
        self._clock = clock
        self._liveness = Liveness(timeout_s)
        self._on_unresponsive = on_unresponsive
        self._prober: LivenessProber | None = None

    @property
    def is_unresponsive(self) -> bool:
        return self._liveness.is_unresponsive

    @property
    def last_activity_at(self) -> float | None:
        """Time of the last activity; None where the server is not probed."""
        if self._prober is None:
            return None
        self._sync_activity()
        return self._liveness.last_activity_at

    def start_probing(self, poller: MetricsPoller | None, interval_s: float) -> None:
        """Start probing: with the metrics page where there is one, else with the list of models."""
        if self._prober is None:
            self._prober = LivenessProber(
                self._liveness,
                self._clock,
                interval_s,
                poll=self.ping if poller is None else poller.poll,
                ping=self.ping,
                sync_activity=self._sync_activity,
                is_busy=self._is_busy,
                on_unresponsive=self._on_unresponsive,
                skip_when_active=poller is None,
            )
            self.on_response()
            self._prober.start()

    async def close(self) -> None:
        if self._prober is not None:
            await self._prober.close()

    def on_calls(self) -> None:
        if self._prober is not None:
            self._prober.on_calls()

    def on_unreachable(self) -> None:
        """Probe now: a call could not be sent."""
        if self._prober is not None:
            self._prober.wake()

    def on_response(self) -> None:
        """Record activity of the server."""
        self._liveness.on_response(self._now())

    def ended(self, call: Call) -> None:
        """Record the activity of a call that has ended."""
        if call.last_activity_at > call.sent_at:
            self._liveness.on_response(call.last_activity_at)

    async def ping(self) -> None:
        probed_at = self._now()
        try:
            await self._server.ping(self._probe_timeout_s())
        except WorkerLost:
            return
        self._on_probe_response(probed_at)

    async def metrics_page(self) -> tuple[int, bytes]:
        """Raises WorkerLost."""
        probed_at = self._now()
        page = await self._server.metrics_page(self._probe_timeout_s())
        self._on_probe_response(probed_at)
        return page

    async def abort(self, request_ids: Sequence[str]) -> bool:
        """Raises WorkerLost."""
        return await self._server.abort(request_ids, MISSED_PROBES * self._probe_timeout_s())

    def _sync_activity(self) -> None:
        # Collected when needed, so that there is no work per token.
        for call in self._calls.values():
            if call.last_activity_at > call.sent_at:
                self._liveness.on_response(call.last_activity_at)

    def _is_busy(self) -> bool:
        return bool(self._calls)

    def _on_probe_response(self, probed_at: float) -> None:
        now = self._now()
        self._liveness.on_probe_response(now - probed_at, now)

    def _probe_timeout_s(self) -> float:
        if not self._calls:
            return self._liveness.probe_timeout_s(None)
        unread_bytes = sum(
            len(call.job.payload.body) for call in self._calls.values() if call.last_activity_at <= call.sent_at
        )
        return self._liveness.probe_timeout_s(unread_bytes)
