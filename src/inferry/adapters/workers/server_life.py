"""The life of one server over HTTP: questions that are answered, bytes of its calls, and what follows from silence.

Belongs to the worker's event loop.
"""

from collections.abc import Callable, Mapping, Sequence

from inferry.adapters.workers.abilities import ServerQuestions
from inferry.adapters.workers.calls import Call
from inferry.adapters.workers.engine_watch import EngineWatch
from inferry.adapters.workers.life_watch import LifeWatch
from inferry.adapters.workers.liveness import MISSES, Liveness
from inferry.domain.clock import Clock
from inferry.domain.errors import WorkerLost


class ServerLife:
    """`calls` are the worker's own; `on_silent` is called once when the server falls silent."""

    def __init__(
        self,
        server: ServerQuestions,
        calls: Mapping[str, Call],
        clock: Clock,
        timeout_s: float,
        on_silent: Callable[[], None],
    ) -> None:
        self._server = server
        self._calls = calls
        self._now = clock.now
        self._clock = clock
        self._liveness = Liveness(timeout_s)
        self._on_silent = on_silent
        self._watch: LifeWatch | None = None

    @property
    def is_silent(self) -> bool:
        return self._liveness.is_silent

    @property
    def heard_at(self) -> float | None:
        """The last sign of life; None where the server is not watched."""
        if self._watch is None:
            return None
        self._hear()
        return self._liveness.heard_at

    def watch(self, engine: EngineWatch | None, interval_s: float) -> None:
        """Ask from now on: for the metrics page where there is one, and for the models where not."""
        if self._watch is None:
            self._watch = LifeWatch(
                self._liveness,
                self._clock,
                interval_s,
                look=self.ping if engine is None else engine.look,
                ping=self.ping,
                hear=self._hear,
                is_busy=self._is_busy,
                on_silent=self._on_silent,
                only_in_silence=engine is None,
            )
            self.heard()
            self._watch.start()

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()

    def work_came(self) -> None:
        if self._watch is not None:
            self._watch.work_came()

    def unreachable(self) -> None:
        """A call could not be sent: ask now."""
        if self._watch is not None:
            self._watch.wake()

    def heard(self) -> None:
        """The server has said something."""
        self._liveness.heard(self._now())

    def ended(self, call: Call) -> None:
        """A call is over: what it heard must not be forgotten with it."""
        if call.heard_at > call.sent_at:
            self._liveness.heard(call.heard_at)

    async def ping(self) -> None:
        asked_at = self._now()
        try:
            await self._server.ping(self._question_s())
        except WorkerLost:
            return
        self._answered(asked_at)

    async def metrics_page(self) -> tuple[int, bytes]:
        """Raises WorkerLost."""
        asked_at = self._now()
        page = await self._server.metrics_page(self._question_s())
        self._answered(asked_at)
        return page

    async def abort(self, request_ids: Sequence[str]) -> bool:
        """Raises WorkerLost."""
        return await self._server.abort(request_ids, MISSES * self._question_s())

    def _hear(self) -> None:
        # Looked up when it is needed: nothing is done for this per token.
        for call in self._calls.values():
            if call.heard_at > call.sent_at:
                self._liveness.heard(call.heard_at)

    def _is_busy(self) -> bool:
        return bool(self._calls)

    def _answered(self, asked_at: float) -> None:
        now = self._now()
        self._liveness.answered(now - asked_at, now)

    def _question_s(self) -> float:
        if not self._calls:
            return self._liveness.question_s(None)
        unread = sum(len(call.job.payload.body) for call in self._calls.values() if call.heard_at <= call.sent_at)
        return self._liveness.question_s(unread)
