"""`/admin/tenants…` and `/admin/keys…`: tenants and keys, changed while the gateway runs.

The text of a key is in the response that creates it and nowhere else. `Admin` has authorized the request. The database
is accessed off the event loop; a change is in force when its response is sent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from inferry.dispatch.gateway import Gateway
from inferry.domain.errors import Conflict, GatewayError, InternalError, InvalidRequest, MethodNotAllowed
from inferry.domain.keys import MAX_DURATION_S, NewKey, key_as_dict
from inferry.domain.tenant_settings import LimitSettings, TenantSettings
from inferry.domain.tenants import ApiKey, Limits, Tenant
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request

log = logging.getLogger(__name__)

TENANTS = "/admin/tenants"
KEYS = "/admin/keys"
PATHS = (
    *(f"GET {TENANTS}", f"GET {TENANTS}/{{name}}", f"PUT {TENANTS}/{{name}}", f"DELETE {TENANTS}/{{name}}"),
    *(f"GET {KEYS}", f"POST {KEYS}", f"GET {KEYS}/{{id}}", f"DELETE {KEYS}/{{id}}", f"POST {KEYS}/{{id}}/rotate"),
)
KEY_STATUSES = ("valid", "expired", "revoked")
DAY_S = 86_400

_JSON = b"content-type: application/json\r\ncache-control: no-store\r\n"

T = TypeVar("T")
Refuse = Callable[[GatewayError, Request, Reply], None]
Answer = tuple[int, Any]


class TenantStore(Protocol):
    """The database of tenants and keys. Its methods block."""

    def tenants(self, wall: float) -> list[dict[str, Any]]: ...
    def tenant(self, name: str, wall: float) -> dict[str, Any]: ...
    def keys(self, wall: float) -> list[dict[str, Any]]: ...
    def key(self, key_id: str, wall: float) -> dict[str, Any]: ...
    def put_tenant(self, tenant: Tenant) -> None: ...
    def remove_tenant(self, name: str, now: float) -> int: ...
    def create_key(
        self, tenant: str, *, now: float, label: str = "", limits: Limits | None = None, expires_at: float | None = None
    ) -> NewKey: ...
    def revoke_key(self, key_id: str, now: float) -> ApiKey: ...
    def rotate_key(self, key_id: str, now: float, grace_s: float) -> NewKey: ...


class TenantStoreExecutor(Protocol):
    """Runs operations on the store off the event loop."""

    async def ask(self, operation: Callable[[Any, float], T]) -> T:
        """Run a read operation."""
        ...

    async def change(self, operation: Callable[[Any, float], T]) -> T:
        """Run a change. It is in force when this returns."""
        ...


class WrongMethod(MethodNotAllowed):
    """`allow` is the list of supported methods."""

    def __init__(self, path: str, allow: str) -> None:
        super().__init__(f"{path} supports only {allow.replace(', ', ' and ')}")
        self.allow = allow


class CreateKeyBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key to create."""

    tenant: str
    label: str = ""
    expires_in_s: float | None = None
    limits: LimitSettings = LimitSettings()


class RotateKeyBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the old key stays valid."""

    grace_s: float = DAY_S


BodyT = TypeVar("BodyT", bound=Struct)


class AdminTenants:
    """The endpoints. `refuse` sends an error response."""

    def __init__(self, executor: TenantStoreExecutor, gateway: Gateway, refuse: Refuse) -> None:
        self._executor = executor
        self._gateway = gateway
        self._refuse = refuse
        self._pending: set[asyncio.Task[None]] = set()

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        """Answer the request later and return True; return False for other paths. Raises GatewayError."""
        work = self._route(path, request)
        if work is None:
            return False
        task = asyncio.get_running_loop().create_task(self._answer(work, request, reply))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        return True

    def _route(self, path: str, request: Request) -> Awaitable[Answer] | None:
        if request.problem is not None:
            raise request.problem
        method = "GET" if request.method == b"HEAD" else request.method.decode("latin-1")
        if path == TENANTS:
            _check_method(method, path, "GET")
            return self._list_tenants(request)
        if path == KEYS:
            _check_method(method, path, "GET", "POST")
            return self._list_keys(request) if method == "GET" else self._create_key(request)
        if path.startswith(f"{TENANTS}/"):
            name = path.removeprefix(f"{TENANTS}/")
            _check_method(method, f"{TENANTS}/{{name}}", "GET", "PUT", "DELETE")
            if method == "GET":
                return self._show_tenant(name)
            return self._put_tenant(name, request) if method == "PUT" else self._remove_tenant(name)
        if path.startswith(f"{KEYS}/"):
            key_id, _, rest = path.removeprefix(f"{KEYS}/").partition("/")
            if rest == "rotate":
                _check_method(method, f"{KEYS}/{{id}}/rotate", "POST")
                return self._rotate_key(key_id, request)
            if not rest:
                _check_method(method, f"{KEYS}/{{id}}", "GET", "DELETE")
                return self._show_key(key_id) if method == "GET" else self._revoke_key(key_id)
        return None

    async def _answer(self, work: Awaitable[Answer], request: Request, reply: Reply) -> None:
        try:
            status, value = await work
            reply.respond(status, _JSON, msgspec.json.encode(value))
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            # The details go to the log only.
            log.exception("the database of tenants and keys failed")
            self._refuse(InternalError("the database of tenants and keys failed"), request, reply)

    # -- tenants -----------------------------------------------------------------------------------------------------

    async def _list_tenants(self, request: Request) -> Answer:
        _query(request)
        return await self._executor.ask(lambda store, now: (200, {"tenants": store.tenants(now)}))

    async def _show_tenant(self, name: str) -> Answer:
        return await self._executor.ask(lambda store, now: (200, store.tenant(name, now)))

    async def _put_tenant(self, name: str, request: Request) -> Answer:
        settings = _decode_body(request, TenantSettings)
        _check(settings)
        if settings.isolation == "pool" and not any(view.isolation == name for view in self._gateway.views()):
            raise Conflict("no worker belongs to this tenant's `pool`: its calls could not run", param="isolation")

        def put(store: TenantStore, now: float) -> Answer:
            store.put_tenant(settings.tenant(name))
            return 200, store.tenant(name, now)

        return await self._executor.change(put)

    async def _remove_tenant(self, name: str) -> Answer:
        return await self._executor.change(
            lambda store, now: (200, {"name": name, "revoked_keys": store.remove_tenant(name, now)})
        )

    # -- keys --------------------------------------------------------------------------------------------------------

    async def _list_keys(self, request: Request) -> Answer:
        filters = _query(request, "tenant", "status")
        if filters.get("status", KEY_STATUSES[0]) not in KEY_STATUSES:
            raise InvalidRequest(f"`status` must be one of {', '.join(KEY_STATUSES)}", param="status")

        def keys(store: TenantStore, now: float) -> Answer:
            return 200, {
                "keys": [key for key in store.keys(now) if all(key[name] == value for name, value in filters.items())]
            }

        return await self._executor.ask(keys)

    async def _show_key(self, key_id: str) -> Answer:
        return await self._executor.ask(lambda store, now: (200, store.key(key_id, now)))

    async def _create_key(self, request: Request) -> Answer:
        body = _decode_body(request, CreateKeyBody)
        _check(body.limits)
        _check_duration("expires_in_s", body.expires_in_s, minimum=1)

        def create(store: TenantStore, now: float) -> Answer:
            expires_at = None if body.expires_in_s is None else now + body.expires_in_s
            limits = body.limits.limits()
            return _created_key_response(
                store.create_key(body.tenant, now=now, label=body.label, limits=limits, expires_at=expires_at), now
            )

        return await self._executor.change(create)

    async def _revoke_key(self, key_id: str) -> Answer:
        return await self._executor.change(lambda store, now: (200, key_as_dict(store.revoke_key(key_id, now), now)))

    async def _rotate_key(self, key_id: str, request: Request) -> Answer:
        body = _decode_body(request, RotateKeyBody) if request.body.strip() else RotateKeyBody()
        _check_duration("grace_s", body.grace_s, minimum=0)
        return await self._executor.change(
            lambda store, now: _created_key_response(store.rotate_key(key_id, now, body.grace_s), now)
        )


def _check_method(method: str, path: str, *allowed: str) -> None:
    if method not in allowed:
        raise WrongMethod(path, ", ".join(["GET, HEAD" if one == "GET" else one for one in allowed]))


def _query(request: Request, *names: str) -> dict[str, str]:
    _, _, text = request.target.partition(b"?")
    given = dict(parse_qsl(text.decode("latin-1"), keep_blank_values=True))
    for name in given:
        if name not in names:
            known = f"supported are {', '.join(names)}" if names else "this path has none"
            raise InvalidRequest(f"unknown query parameter; {known}")
    return given


def _decode_body(request: Request, kind: type[BodyT]) -> BodyT:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        path = where.strip("`").removeprefix("$").removeprefix(".")
        raise InvalidRequest(f"invalid body: {what}", param=path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the body must be a JSON object") from None


def _check(settings: LimitSettings) -> None:
    problems = list(settings.validation_errors())
    if problems:
        raise InvalidRequest("; ".join(problems), param=problems[0].partition(" ")[0])


def _check_duration(name: str, seconds: float | None, *, minimum: float) -> None:
    if seconds is not None and not minimum <= seconds <= MAX_DURATION_S:
        raise InvalidRequest(f"{name} must be between {minimum:g} and {MAX_DURATION_S} seconds", param=name)


def _created_key_response(created: NewKey, now: float) -> Answer:
    return 201, {**key_as_dict(created.key, now), "key": created.text}
