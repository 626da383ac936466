"""A gateway before one scripted worker, and clients of `/v1/jobs`."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, Answer, TenantGateway, bearer
from support.waiting import until

BODY = {"model": "m", "messages": [{"role": "user", "content": "the question"}]}
CALLBACKS = {"allow_http": True, "allowed_networks": ["127.0.0.0/8"], "initial_backoff_s": 0.05, "max_backoff_s": 0.2}


class Jobs(TenantGateway):
    worker: ScriptedWorker

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any] | None = None,
        make_worker: Callable[[], ScriptedWorker] = ScriptedWorker,
    ) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
            self.worker = make_worker()
            return [self.worker], {}

        super().__init__(directory, make, {"callbacks": CALLBACKS, **(config or {})})

    def __enter__(self) -> "Jobs":
        super().__enter__()
        self.acme = self.key("acme")
        return self

    def create(self, body: Any = BODY, endpoint: str = CHAT, *, key: str | None = None, **more: Any) -> Answer:
        headers = {name.replace("_", "-"): more.pop(name) for name in list(more) if name.startswith(("x_", "idem"))}
        given = {"endpoint": endpoint, "body": body, **more}
        return self.call("POST", "/v1/jobs", given, bearer(key or self.acme, **headers))

    def get(self, id: str, key: str | None = None) -> Any:
        answer = self.call("GET", f"/v1/jobs/{id}", None, bearer(key or self.acme))
        assert answer.status == 200, answer.body
        return answer.json

    def ended(self, id: str) -> Any:
        until(lambda: self.get(id)["status"] != "in_progress")
        return self.get(id)

    def secret(self, tenant: str = "acme", **more: Any) -> bytes:
        answer = self.as_admin("POST", f"/admin/tenants/{tenant}/callback-secrets", more)
        assert answer.status == 201, answer.body
        return base64.b64decode(answer.json["secret"].removeprefix("whsec_"))
