"""Pages without authentication: health, readiness, metrics and the description of the API."""

from collections.abc import Callable
from typing import Final

import msgspec

from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import Caller
from inferry.ingress.http.reply import Reply
from inferry.ingress.openapi import document
from inferry.observe.metrics import Metrics

Handler = Callable[[str, Reply, Caller], None]

_JSON: Final = b"content-type: application/json\r\n"


class PublicPages:
    """`problem` says what makes the ledger unavailable; None while it is available."""

    def __init__(self, gateway: Gateway, metrics: Metrics, problem: Callable[[], str | None]) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._problem = problem
        self.handlers: dict[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics_page,
            "/openapi.json": self._openapi_document,
        }

    def _health(self, path: str, reply: Reply, caller: Caller) -> None:
        """Liveness: the process responds."""
        reply.respond(200, _JSON, msgspec.json.encode({"status": "ok"}))

    def _ready(self, path: str, reply: Reply, caller: Caller) -> None:
        """Readiness: a worker has completed a generation, the gateway accepts calls, and the ledger is available."""
        problem = self._problem()
        ready = self._gateway.is_ready and problem is None
        state = "draining" if self._gateway.is_draining else "ready" if ready else "starting"
        status = state if problem is None else "ledger_unavailable"
        workers = {view.worker: view.phase.value for view in self._gateway.views()}
        reason = {} if problem is None else {"reason": problem}
        body = msgspec.json.encode({"status": status, **reason, "workers": workers})
        reply.respond(200 if ready else 503, _JSON, body)

    def _metrics_page(self, path: str, reply: Reply, caller: Caller) -> None:
        body, content_type = self._metrics.render()
        reply.respond(200, b"content-type: %b\r\n" % content_type.encode(), body)

    def _openapi_document(self, path: str, reply: Reply, caller: Caller) -> None:
        reply.respond(200, _JSON, document.render_document())
