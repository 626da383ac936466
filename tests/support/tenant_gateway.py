"""A gateway that requires keys, and calls with different keys."""

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.serving import MakeWorkers, Serving

ADMIN_KEY = "the-admin-key-of-these-tests"
CHAT = "/v1/chat/completions"


class Answer(NamedTuple):
    """`headers` have small letters; `json` is None where the body is none."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def code(self) -> Any:
        """The error's code, or its type in an API without codes."""
        error = self.json["error"]
        return error.get("code", error["type"])


class TenantGateway(Serving):
    """`call` as anybody; `as_admin`; `key` makes one for a tenant and returns its text."""

    def __init__(
        self, directory: Path, make_workers: MakeWorkers | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        given = {"auth": {"mode": "on"}, **(config or {})}
        given["server"] = {"admin_key": ADMIN_KEY, **given.get("server", {})}
        super().__init__(directory, make_workers, given)

    def key(self, tenant: str, **more: Any) -> str:
        answer = self.as_admin("POST", "/admin/keys", {"tenant": tenant, **more})
        assert answer.status == 201, answer.body
        text: str = answer.json["key"]
        return text

    def as_admin(self, method: str, path: str, body: Any = None) -> Answer:
        return self.call(method, path, body, {"authorization": f"Bearer {ADMIN_KEY}"})

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, dict(headers or {}))
            response = connection.getresponse()
            data = response.read()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data)
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.call("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}
