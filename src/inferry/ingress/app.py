"""Routes requests: the inference endpoints, and the rest. Nothing here blocks or awaits."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from inferry._version import __version__
from inferry.dispatch.gateway import Gateway, ReadyJob
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.errors import ClientClosed, GatewayError, InternalError, MethodNotAllowed, NotFound
from inferry.domain.jobs import InferenceJob
from inferry.domain.runs import RunQueries
from inferry.durable.callback_secrets import CallbackSecrets
from inferry.durable.tenant_data import TenantData
from inferry.ingress.admin import PATHS as ADMIN_PATHS
from inferry.ingress.admin import PREFIXES as ADMIN_PREFIXES
from inferry.ingress.admin import Admin, is_admin_path
from inferry.ingress.admin_adapters import AdminAdapters
from inferry.ingress.admin_alerts import AdminAlerts
from inferry.ingress.admin_callbacks import AdminCallbacks
from inferry.ingress.admin_endpoint import AdminEndpoint
from inferry.ingress.admin_storage import AdminStorage
from inferry.ingress.admin_tenants import AdminTenants, TenantStoreExecutor
from inferry.ingress.anthropic.count_tokens import TokenCountsRouter
from inferry.ingress.anthropic.decode import MESSAGES, MessagesEndpoint
from inferry.ingress.auth import Auth
from inferry.ingress.composed import ComposedCalls
from inferry.ingress.composed_call import CallContext
from inferry.ingress.dashboard import static
from inferry.ingress.dashboard.data import DashboardData
from inferry.ingress.dashboard.endpoints import SESSION, DashboardEndpoints
from inferry.ingress.errors import error_headers, printable
from inferry.ingress.headers import request_id
from inferry.ingress.http.limits import HttpLimits
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.job_ids import new_job_id
from inferry.ingress.job_parser import LongPrompt, parse
from inferry.ingress.models import ModelsRouter
from inferry.ingress.openai.decode import ChatEndpoint
from inferry.ingress.openai.prompt_calls import CompletionsEndpoint
from inferry.ingress.openai.rate_limit_headers import has_rate_limits, rate_limit_headers
from inferry.ingress.pooling.decode import ENDPOINTS, PooledEndpoint
from inferry.ingress.pooling.parse import parse_pooled
from inferry.ingress.public_pages import Handler, PublicPages
from inferry.ingress.response import HeartbeatTimer, start_response
from inferry.ingress.responses.endpoint import RESPONSES, ResponsesEndpoint
from inferry.ingress.router import Fail, Refuse, Router
from inferry.ingress.runs import PATHS as RUN_PATHS
from inferry.ingress.runs import PREFIX as RUNS
from inferry.ingress.runs import RunEndpoints
from inferry.ingress.wire_format import OPENAI, ClientRequest, DeferredRequest, Endpoint, WireFormat
from inferry.observe.metrics import Metrics
from inferry.observe.request_counts import RequestCounts
from inferry.observe.tracing.tracer import Tracer
from inferry.pipelines.versions import ComposedVersions

log = logging.getLogger(__name__)
CHATS: Final = frozenset({b"/v1/chat/completions", MESSAGES, RESPONSES})

_JSON: Final = b"content-type: application/json\r\n"
_API_PREFIX: Final = "/v1/"


class App:
    """One gateway over HTTP. Belongs to the event loop it is created on."""

    def __init__(
        self,
        gateway: Gateway,
        metrics: Metrics,
        limits: HttpLimits,
        auth: Auth,
        *,
        admin_key: str | None = None,
        tenants: TenantStoreExecutor | None = None,
        run_reader: RunQueries | None = None,
        problem: Callable[[], str | None] = lambda: None,
        tracer: Tracer | None = None,
    ) -> None:
        self.limits = limits
        self._gateway = gateway
        self._metrics = metrics
        self._tracer = tracer
        self._auth = auth
        self._admin = Admin(
            gateway, admin_key, None if tenants is None else AdminTenants(tenants, gateway, self._refuse)
        )
        self._admin.adapters = AdminAdapters(gateway.adapters, self._refuse)
        self.runs = RunEndpoints(gateway, run_reader, self._refuse, self._internal_error)
        self._files = static.DashboardFiles()
        self._heartbeats = HeartbeatTimer(limits.heartbeat_interval_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self.responses = ResponsesEndpoint(gateway.wall, gateway.models, gateway.reserved_bytes)
        self._posts: dict[bytes, Endpoint] = {
            b"/v1/chat/completions": ChatEndpoint(),
            b"/v1/completions": CompletionsEndpoint(gateway, limits, self._heartbeats, auth, self._refuse, tracer),
            MESSAGES: MessagesEndpoint(),
            RESPONSES: self.responses,
            **ENDPOINTS,
        }
        self._composed: ComposedCalls | None = None
        self._models = ModelsRouter(self._refuse, self._internal_error, gateway)
        self._token_counts = TokenCountsRouter(self._refuse, self._internal_error, gateway)
        self._routers: list[Router] = [self._token_counts, self._models]
        self._gets: dict[str, Handler] = {"/": self._index, **PublicPages(gateway, metrics, problem).handlers}

    @property
    def inference_paths(self) -> list[str]:
        return [path.decode() for path in self._posts]

    def count_requests(self) -> RequestCounts:
        """The counters of HTTP requests, by the endpoints that are mounted now."""
        prefixes = [*self.inference_paths, *self._gets, RUNS, *(router.prefix for router in self._routers)]
        self._metrics.serve_endpoints([*prefixes, *ADMIN_PREFIXES])
        return self._metrics.requests

    def mount(self, router: Callable[[Refuse, Fail], Router]) -> None:
        """Serve the endpoints of a router. An earlier router has precedence."""
        self._routers.append(router(self._refuse, self._internal_error))

    def mount_admin(self, endpoint: Callable[[Refuse, Fail], AdminEndpoint]) -> None:
        """Serve further endpoints under `/admin/`."""
        self._admin.endpoints.append(endpoint(self._refuse, self._internal_error))

    def use_storage(self, data: TenantData, secrets: CallbackSecrets) -> None:
        """Let operators delete the stored content of tenants, and rotate their callback secrets."""
        self._admin.storage = AdminStorage(data, self._refuse)
        self._admin.callbacks = AdminCallbacks(secrets, self._refuse)

    def use_dashboard(self, data: DashboardData) -> None:
        """Serve the dashboard's data to operators."""
        self._admin.dashboard = DashboardEndpoints(
            self._refuse, self._internal_error, data, self._gateway, self.runs, self._admin.sessions
        )

    def use_histories(self, around: Callable[[Endpoint], Endpoint]) -> None:
        """Summarise the histories of long chats, with an endpoint around each of theirs."""
        for path in CHATS:
            self._posts[path] = around(self._posts[path])

    def use_alerts(self, report: Callable[[], list[dict[str, object]]]) -> None:
        """Show alerts to operators."""
        self._admin.alerts = AdminAlerts(report)

    def use_composed(self, models: ComposedVersions) -> ComposedCalls:
        """Serve composed models too, under names that no worker serves. Returns what serves their calls."""
        self._models.composed = self._token_counts.composed = models
        unread, tracer = self.limits.max_unread_bytes, self._tracer
        gateway, refuse = self._gateway, self._refuse
        context = CallContext(models, gateway, self._posts, self.serve, refuse, self._heartbeats, unread, tracer)
        self._composed = ComposedCalls(context)
        return self._composed

    def accepts_body(self, request: Request, peer: str) -> bool:
        """Whether to read a request's body: the caller is authenticated and the path accepts one. Never raises.

        Sets the request's `caller`, or its `problem`.
        """
        try:
            if request.target in self._posts:
                request.caller = self._auth.caller(request.headers, peer)
                return True
            path = _decode_path(request.target.partition(b"?")[0])
            if is_admin_path(path):
                if path != SESSION:
                    self._admin.authorize(request, peer)
                return path != SESSION
            if path.startswith(_API_PREFIX):
                caller = request.caller = self._auth.caller(request.headers, peer)
                router = self._router_of(path)
                request.sink = None if router is None else router.body_sink(request, caller)
                return True
        except GatewayError as error:
            error.__traceback__ = None  # its frames refer to the request, which would keep the data read in memory
            request.problem = error
        return False

    def serve(self, request: Request, reply: Reply) -> None:
        """Answer the request, at once or later. Never raises."""
        try:
            endpoint = self._posts.get(request.target)
            if endpoint is not None and request.method == b"POST":
                self._generate(endpoint, request, reply)
            else:
                self._route(request, reply)
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            self._internal_error(request, reply)

    # -- inference ---------------------------------------------------------------------------------------------------

    def _generate(self, endpoint: Endpoint, request: Request, reply: Reply) -> None:
        if self._tracer is not None and request.trace is None:
            request.trace = self._tracer.begin(request.headers, request.target.partition(b"?")[0].decode("latin-1"))
        if request.problem is not None:
            self._metrics.refused(request.problem.code)
            self._refuse(request.problem, request, reply)
            return
        caller = ANONYMOUS
        client_request: ClientRequest | None = None
        try:
            caller = request.caller or self._auth.caller(request.headers, reply.peer)
            models = self._gateway.models
            if isinstance(endpoint, PooledEndpoint):
                pooled = endpoint.decode_pooled(request.body)
                wire_format = pooled.format
                job = parse_pooled(pooled, request.headers, models, caller)
            else:
                decoded = endpoint.decode(request.body)
                if isinstance(decoded, DeferredRequest):
                    self._start_task(self._prepare(decoded, caller, request, reply))
                    return
                client_request, wire_format = decoded, decoded.format
                job = parse(decoded, request.headers, models, caller)
        except GatewayError as error:
            if self._compose(error, client_request, request, reply, caller):
                return
            self._metrics.refused(error.code)
            self._refuse(error, request, reply, caller)
            return
        self._continue(job, wire_format, caller, request, reply)

    def _compose(
        self, error: GatewayError, decoded: ClientRequest | None, request: Request, reply: Reply, caller: Caller
    ) -> bool:
        """Serve a call that was refused because no worker serves its model, where that is a composed model."""
        return self._composed is not None and self._composed.serve(error, decoded, request, reply, caller)

    def _continue(
        self, job: InferenceJob | LongPrompt, wire_format: WireFormat, caller: Caller, request: Request, reply: Reply
    ) -> None:
        if isinstance(job, LongPrompt):
            ready = partial(self._gateway.lineages.after, job.job, caller)
            self._start_task(self._submit_later(ready, caller, request, reply, wire_format))
        elif (waiting := self._gateway.lineages.pending(job, caller)) is not None:
            self._start_task(self._submit_later(waiting, caller, request, reply, wire_format))
        else:
            self._submit(job, caller, request, reply, wire_format)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, deferred: DeferredRequest, caller: Caller, request: Request, reply: Reply) -> None:
        decoded: ClientRequest | None = None
        try:
            try:
                decoded = await deferred.prepare(request, reply, caller)
                if decoded is None or reply.is_disconnected:
                    return
                job = parse(decoded, request.headers, self._gateway.models, caller)
            except GatewayError as error:
                if self._compose(error, decoded, request, reply, caller):
                    return
                self._metrics.refused(error.code)
                raise
            self._continue(job, decoded.format, caller, request, reply)
        except GatewayError as error:
            self._refuse(error, request, reply, caller)
        except Exception:
            self._internal_error(request, reply)

    async def _submit_later(
        self, ready: ReadyJob, caller: Caller, request: Request, reply: Reply, wire_format: WireFormat
    ) -> None:
        try:
            try:
                with self._gateway.reserved_bytes(len(request.body)):
                    job = await ready()
                if reply.is_disconnected:
                    raise ClientClosed("the client disconnected before its call was admitted")
                if not request.is_internal:
                    caller = self._auth.caller(request.headers, reply.peer)  # the key may have been revoked meanwhile
            except GatewayError as error:
                self._metrics.refused(error.code)
                raise
            self._submit(job, caller, request, reply, wire_format)
        except GatewayError as error:
            self._refuse(error, request, reply, caller)
        except Exception:
            self._internal_error(request, reply)

    def _submit(
        self, job: InferenceJob, caller: Caller, request: Request, reply: Reply, wire_format: WireFormat
    ) -> None:
        gateway = self._gateway
        if self._tracer is not None and request.trace is not None:
            self._tracer.adopt(request.trace, job)
        try:
            stream = gateway.submit(job, caller)
        except GatewayError as error:
            self._refuse(error, request, reply, caller)
            return
        start_response(stream, job, gateway, reply, wire_format, self._heartbeats, self.limits.max_unread_bytes, caller)

    # -- other endpoints ---------------------------------------------------------------------------------------------

    def _route(self, request: Request, reply: Reply) -> None:
        target, _, query = request.target.partition(b"?")
        endpoint = self._posts.get(target)
        if endpoint is not None and request.method == b"POST":
            self._generate(endpoint, request, reply)
            return
        if request.problem is not None:
            self._refuse(request.problem, request, reply)
            return
        path = _decode_path(target)
        caller = ANONYMOUS
        if is_admin_path(path):
            self._admin.serve(path, request, reply)
            return
        if path.startswith(_API_PREFIX):
            caller = request.caller or self._auth.caller(request.headers, reply.peer)
            is_run = path == RUNS or path.startswith(f"{RUNS}/")
            router = self.runs if is_run else self._router_of(path)
            if router is not None:
                router.serve(target.decode("latin-1"), query.decode("latin-1"), request, reply, caller)
                return
        handler = self._file if path.startswith(static.PREFIX) else self._gets.get(path)
        if handler is None and endpoint is None:
            raise NotFound(f"unknown path {printable(path)}; GET / lists the endpoints")
        if handler is None or request.method not in (b"GET", b"HEAD"):
            raise MethodNotAllowed(f"{printable(path)} supports only {'GET' if endpoint is None else 'POST'}")
        handler(path, reply, caller)

    def use_ledger(self, open_reader: Callable[[], RunQueries | None]) -> None:
        """Read runs from another ledger from now on."""
        self.runs.use_ledger(open_reader)

    async def close(self) -> None:
        """Close the ledger. Nothing may be served after this."""
        if self._composed is not None:
            await self._composed.close()
        for router in self._routers:
            await router.close()
        await self._admin.close()
        await self.runs.close()

    def _index(self, path: str, reply: Reply, caller: Caller) -> None:
        if static.wants_page(reply.request):
            self._files.serve_index(reply)
            return
        posts = [f"POST {path.decode()}" for path in self._posts]
        gets = [f"GET {path}" for path in self._gets if path != "/"]
        mounted = [path for router in self._routers for path in router.paths]
        endpoints = [*posts, *gets, *static.PATHS, *RUN_PATHS, *mounted, *ADMIN_PATHS]
        body = msgspec.json.encode({"name": "inferry", "version": __version__, "endpoints": endpoints})
        reply.respond(200, _JSON + b"vary: accept\r\n", body)

    def _file(self, path: str, reply: Reply, caller: Caller) -> None:
        self._files.serve(path.removeprefix(static.PREFIX), reply)

    def _refuse(self, error: GatewayError, request: Request, reply: Reply, caller: Caller = ANONYMOUS) -> None:
        generated_id = new_job_id()
        headers = error_headers(error, generated_id)
        if has_rate_limits(caller) is not None:
            headers += rate_limit_headers(self._gateway, caller)
        if isinstance(error, MethodNotAllowed):
            target = request.target.partition(b"?")[0]
            allow = getattr(error, "allow", None)
            if allow is None:
                accepts_post = target in self._posts or (target.startswith(b"/admin/") and target != b"/admin/workers")
                allow = "POST" if accepts_post else "GET, HEAD"
            headers += b"allow: %b\r\n" % allow.encode()
        answer_id = request_id(request.headers) or generated_id
        wire_format = self._format_of(request)
        status = wire_format.error_status(error)
        if self._tracer is not None and request.trace is not None:
            self._tracer.refused(request.trace, error, status)
        headers += wire_format.id_headers(answer_id)
        reply.respond(status, headers, wire_format.error_body(error, answer_id))

    def _format_of(self, request: Request) -> WireFormat:
        """The format of errors at this path."""
        target = request.target.partition(b"?")[0]
        endpoint = self._posts.get(MESSAGES if target.startswith(MESSAGES + b"/") else target)
        if endpoint is not None:
            return endpoint.format
        router = self._router_of(_decode_path(target))
        return OPENAI if router is None else router.format_of(request)

    def _router_of(self, path: str) -> Router | None:
        return next((router for router in self._routers if router.owns(path)), None)

    def _internal_error(self, request: Request, reply: Reply) -> None:
        log.exception("a request failed")
        self._refuse(InternalError("the gateway failed to handle the request"), request, reply)


def _decode_path(target: bytes) -> str:
    return unquote(target.decode("latin-1"))
