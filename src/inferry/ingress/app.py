"""What is behind each path: the two hot endpoints, and the rest. Requests come whole; nothing here waits."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from inferry._version import __version__
from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import ANYBODY, Caller
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InternalError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.runs import RunBook
from inferry.domain.workers import Phase
from inferry.ingress import openapi
from inferry.ingress.admin import PATHS as ADMIN_PATHS
from inferry.ingress.admin import Admin
from inferry.ingress.admin_tenants import AdminTenants, Keeper
from inferry.ingress.auth import Auth
from inferry.ingress.parse import Api, LongPrompt, new_job_id, parse
from inferry.ingress.problems import error_body, error_headers
from inferry.ingress.rates import limited, rate_headers
from inferry.ingress.reply import Reply, Request
from inferry.ingress.respond import Heartbeats, StreamedAnswer, WholeAnswer
from inferry.ingress.runs import PATHS as RUN_PATHS
from inferry.ingress.runs import PREFIX as RUNS
from inferry.ingress.runs import RunEndpoints
from inferry.ingress.values import Limits
from inferry.observe.metrics import Metrics

log = logging.getLogger(__name__)

Handler = Callable[[str, Reply, Caller], None]

_JSON = b"content-type: application/json\r\n"
_CALLS = "/v1/"
_ADMIN = "/admin/"
_MODELS = "/v1/models/"


class App:
    """One gateway over HTTP. Belongs to the event loop it is made on."""

    def __init__(
        self,
        gateway: Gateway,
        metrics: Metrics,
        limits: Limits,
        auth: Auth,
        *,
        admin_key: str | None = None,
        tenants: Keeper | None = None,
        book: RunBook | None = None,
        problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._problem = problem
        self.limits = limits
        self._gateway = gateway
        self._metrics = metrics
        self._auth = auth
        self._admin = Admin(
            gateway, admin_key, None if tenants is None else AdminTenants(tenants, gateway, self._refuse)
        )
        self._runs = RunEndpoints(gateway, book, self._refuse, self._fail)
        self._heartbeats = Heartbeats(limits.heartbeat_s)
        self._tokenising: set[asyncio.Task[None]] = set()
        self._posts: dict[bytes, Api] = {b"/v1/chat/completions": "chat", b"/v1/completions": "completions"}
        self._gets: dict[str, Handler] = {
            "/": self._index,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._expose,
            "/openapi.json": self._describe,
            "/v1/models": self._models,
        }

    def admits(self, request: Request, peer: str) -> bool:
        """Whether the body of a request is worth reading: its sender is let in, and the path takes one. Never raises.

        Who the sender is stays with the request, and so does what is wrong with it.
        """
        try:
            if request.target in self._posts:
                request.caller = self._auth.caller(request.headers, peer)
                return True
            path = _path_of(request.target.partition(b"?")[0])
            if path.startswith(_CALLS):
                request.caller = self._auth.caller(request.headers, peer)
                return True
            if path.startswith(_ADMIN):
                self._admin.let_in(request, peer)
                return True
        except GatewayError as error:
            error.__traceback__ = None  # it leads to frames with this request, and they to what has been read
            request.problem = error
        return False

    def serve(self, request: Request, reply: Reply) -> None:
        """Answer the request, now or later. Never raises."""
        try:
            api = self._posts.get(request.target)
            if api is not None and request.method == b"POST":
                self._generate(api, request, reply)
            else:
                self._other(request, reply)
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            self._fail(request, reply)

    # -- the calls ---------------------------------------------------------------------------------------------------

    def _generate(self, api: Api, request: Request, reply: Reply) -> None:
        if request.problem is not None:
            self._metrics.refused(request.problem.code)
            self._refuse(request.problem, request, reply)
            return
        caller = ANYBODY
        try:
            caller = request.caller or self._auth.caller(request.headers, reply.peer)
            job = parse(api, request.body, request.headers, self._gateway, caller)
        except GatewayError as error:
            self._metrics.refused(error.code)
            self._refuse(error, request, reply, caller)
            return
        if isinstance(job, LongPrompt):
            task = asyncio.get_running_loop().create_task(self._tokenise(job, caller, request, reply))
            self._tokenising.add(task)
            task.add_done_callback(self._tokenising.discard)
        else:
            self._answer(job, caller, request, reply)

    async def _tokenise(self, prompt: LongPrompt, caller: Caller, request: Request, reply: Reply) -> None:
        try:
            try:
                with self._gateway.holding(len(request.body)):
                    job = await prompt.job()
                if reply.is_gone:
                    raise ClientClosed("the client left before its prompt was tokenised")
                caller = self._auth.caller(request.headers, reply.peer)  # its key may have been revoked meanwhile
            except GatewayError as error:
                self._metrics.refused(error.code)
                raise
            self._answer(job, caller, request, reply)
        except GatewayError as error:
            self._refuse(error, request, reply, caller)
        except Exception:
            self._fail(request, reply)

    def _answer(self, job: InferenceJob, caller: Caller, request: Request, reply: Reply) -> None:
        gateway = self._gateway
        try:
            stream = gateway.submit(job, caller)
        except GatewayError as error:
            self._refuse(error, request, reply, caller)
            return
        answer: StreamedAnswer | WholeAnswer
        if job.stream:
            unread = self.limits.max_unread_bytes
            answer = StreamedAnswer(stream, job, gateway, reply, self._heartbeats, unread)
        else:
            answer = WholeAnswer(stream, job, gateway, reply)
        if limited(caller) is not None:
            answer.tell_limits_of(caller)
        answer.start()

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _other(self, request: Request, reply: Reply) -> None:
        target, _, query = request.target.partition(b"?")
        api = self._posts.get(target)
        if api is not None and request.method == b"POST":
            self._generate(api, request, reply)
            return
        if request.problem is not None:
            self._refuse(request.problem, request, reply)
            return
        path = _path_of(target)
        caller = ANYBODY
        if path.startswith(_CALLS):
            caller = request.caller or self._auth.caller(request.headers, reply.peer)
            if path == RUNS or path.startswith(f"{RUNS}/"):
                self._runs.serve(target.decode("latin-1"), query.decode("latin-1"), request, reply, caller)
                return
        if path.startswith(_ADMIN):
            self._admin.serve(path, request, reply)
            return
        handler = self._gets.get(path)
        if handler is None and path.startswith(_MODELS):
            handler = self._model
        if handler is None and api is None:
            raise NotFound(f"there is nothing at this path; see GET / for what there is: {_printable(path)}")
        if handler is None or request.method not in (b"GET", b"HEAD"):
            raise MethodNotAllowed(f"{_printable(path)} takes {'GET' if api is None else 'POST'}")
        handler(path, reply, caller)

    def read_from(self, open_book: Callable[[], RunBook | None]) -> None:
        """Read pages of runs from another ledger from now on."""
        self._runs.read_from(open_book)

    async def close(self) -> None:
        """Let go of what pages are read from. Nothing may be served any more."""
        await self._runs.close()

    def _index(self, path: str, reply: Reply, caller: Caller) -> None:
        posts = [f"POST {path.decode()}" for path in self._posts]
        gets = [f"GET {path}" for path in self._gets if path != "/"]
        _send_json(
            reply,
            200,
            {"name": "inferry", "version": __version__, "endpoints": [*posts, *gets, *RUN_PATHS, *ADMIN_PATHS]},
        )

    def _health(self, path: str, reply: Reply, caller: Caller) -> None:
        """Alive: the process answers."""
        _send_json(reply, 200, {"status": "ok"})

    def _ready(self, path: str, reply: Reply, caller: Caller) -> None:
        """Ready: some worker has really generated, new work is welcome, and the ledger is there."""
        problem = self._problem()
        ready = self._gateway.is_ready and problem is None
        status = "draining" if self._gateway.is_draining else "ready" if ready else "starting"
        if problem is not None:
            status = "ledger_unavailable"
        workers = {view.worker: view.phase.value for view in self._gateway.views()}
        reason = {} if problem is None else {"reason": problem}
        _send_json(reply, 200 if ready else 503, {"status": status, **reason, "workers": workers})

    def _expose(self, path: str, reply: Reply, caller: Caller) -> None:
        body, content_type = self._metrics.render()
        reply.whole(200, b"content-type: %b\r\n" % content_type.encode(), body)

    def _describe(self, path: str, reply: Reply, caller: Caller) -> None:
        reply.whole(200, _JSON, openapi.rendered())

    def _models(self, path: str, reply: Reply, caller: Caller) -> None:
        _send_json(reply, 200, {"object": "list", "data": list(self._model_objects(caller).values())})

    def _model(self, path: str, reply: Reply, caller: Caller) -> None:
        name = path.removeprefix(_MODELS)
        found = self._model_objects(caller).get(name)
        if found is None:
            raise ModelNotFound(f"the model `{_printable(name)}` is not served here", param="model")
        _send_json(reply, 200, found)

    def _model_objects(self, caller: Caller) -> dict[str, dict[str, Any]]:
        isolation = caller.pool
        ready = [v for v in self._gateway.views() if v.phase is Phase.READY and v.isolation == isolation]
        up = {model for view in ready for model in view.models}
        return {
            name: {
                "id": name,
                "object": "model",
                "created": card.created,
                "owned_by": "inferry",
                "max_model_len": card.context_tokens,
                "ready": name in up,
            }
            for name, card in self._gateway.cards(isolation).items()
            if caller.may_use(name)
        }

    def _refuse(self, error: GatewayError, request: Request, reply: Reply, caller: Caller = ANYBODY) -> None:
        own_id = new_job_id()
        headers = error_headers(error, own_id)
        if limited(caller) is not None:
            headers += rate_headers(self._gateway, caller)
        if isinstance(error, MethodNotAllowed):
            target = request.target.partition(b"?")[0]
            allow = getattr(error, "allow", None)
            if allow is None:
                takes_post = target in self._posts or (target.startswith(b"/admin/") and target != b"/admin/workers")
                allow = "POST" if takes_post else "GET, HEAD"
            headers += b"allow: %b\r\n" % allow.encode()
        given = request.headers.get(b"x-request-id", b"")
        printable = given if 0 < len(given) <= 256 and all(0x21 <= byte <= 0x7E for byte in given) else b""
        headers += b"x-request-id: %b\r\n" % (printable or own_id.encode())
        reply.whole(error.status, headers, error_body(error))

    def _fail(self, request: Request, reply: Reply) -> None:
        log.exception("a request failed")
        self._refuse(InternalError("the gateway failed to handle the request"), request, reply)


def _send_json(reply: Reply, status: int, value: Any) -> None:
    reply.whole(status, _JSON, msgspec.json.encode(value))


def _path_of(target: bytes) -> str:
    return unquote(target.decode("latin-1"))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:100])
