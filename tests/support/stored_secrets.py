"""Stored content of one tenant, and the requests with which another tenant would try to reach it."""

import json
from typing import Any, NamedTuple

from support.tenant_gateway import TenantGateway, bearer
from support.waiting import until

WORD = "zanzibar"
"""In every file, request and label of the tenant, and in no request of another."""

_BOUNDARY = "b"
_QUESTION = f"the plans for {WORD}"
_PROMPT = {"model": "m", "prompt": _QUESTION, "max_tokens": 2}
_MESSAGE = {"model": "m", "messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 2}


class StoredIds(NamedTuple):
    """One object of every kind, all of them finished. `output` is the batch's output file."""

    file: str
    batch: str
    output: str
    response: str
    job: str
    message_batch: str

    def reads(self) -> list[str]:
        """Paths whose answer has the secrets."""
        return [
            *(f"/v1/files/{self.file}/content", f"/v1/files/{self.output}/content", f"/v1/batches/{self.batch}"),
            *(f"/v1/responses/{self.response}", f"/v1/responses/{self.response}/input_items", f"/v1/jobs/{self.job}"),
            f"/v1/messages/batches/{self.message_batch}/results",
        ]

    def attempts(self) -> list[tuple[str, str, Any]]:
        """Requests of another tenant that name the objects."""
        by_id = [f"/v1/files/{self.file}", f"/v1/files/{self.output}", f"/v1/messages/batches/{self.message_batch}"]
        deleted = [*by_id, f"/v1/responses/{self.response}", f"/v1/jobs/{self.job}"]
        cancelled = [*deleted[2:], f"/v1/batches/{self.batch}"]
        follows = {"model": "m", "input": "and then?", "max_output_tokens": 2}
        reference = [{"type": "item_reference", "id": "msg_1"}]
        batch = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": self.file}
        return [
            *(("GET", path, None) for path in (*self.reads(), *by_id, f"/v1/jobs/{self.job}/deliveries")),
            *(("DELETE", path, None) for path in deleted),
            *(("POST", f"{path}/cancel", {}) for path in cancelled),
            *(("GET", f"/v1/{kind}?after={id}", None) for kind, id in self._listed()),
            ("GET", f"/v1/messages/batches?after_id={self.message_batch}", None),
            ("POST", "/v1/batches", batch),
            ("POST", "/v1/responses", {**follows, "previous_response_id": self.response}),
            ("POST", "/v1/responses", {**follows, "previous_response_id": self.response, "input": reference}),
        ]

    def _listed(self) -> list[tuple[str, str]]:
        return [("files", self.file), ("batches", self.batch), ("jobs", self.job)]


def store_secrets(gateway: TenantGateway, key: str) -> StoredIds:
    """Store content for the tenant of a key."""

    def send(method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = gateway.call(method, path, body, bearer(key, **headers))
        assert answer.status in (200, 202), answer.body
        return answer.json

    def wait(path: str, field: str, end: str) -> Any:
        until(lambda: send("GET", path)[field] == end)
        return send("GET", path)

    line = {"custom_id": WORD, "method": "POST", "url": "/v1/completions", "body": _PROMPT}
    file = send("POST", "/v1/files", _upload(line), content_type=f"multipart/form-data; boundary={_BOUNDARY}")["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = send("POST", "/v1/batches", {**wanted, "metadata": {"of": WORD}})["id"]
    response = send("POST", "/v1/responses", {"model": "m", "input": _QUESTION, "metadata": {"of": WORD}})["id"]
    job = send("POST", "/v1/jobs", {"endpoint": "/v1/completions", "body": _PROMPT, "metadata": {"of": WORD}})["id"]
    messages = send("POST", "/v1/messages/batches", {"requests": [{"custom_id": WORD, "params": _MESSAGE}]})["id"]
    output = wait(f"/v1/batches/{batch}", "status", "completed")["output_file_id"]
    wait(f"/v1/jobs/{job}", "status", "completed")
    wait(f"/v1/messages/batches/{messages}", "processing_status", "ended")
    return StoredIds(file, batch, output, response, job, messages)


def _upload(line: dict[str, Any]) -> bytes:
    parts = (
        'name="purpose"\r\n\r\nbatch',
        f'name="file"; filename="{WORD}.jsonl"\r\n\r\n{json.dumps(line)}\n',
    )
    written = "".join(f"--{_BOUNDARY}\r\ncontent-disposition: form-data; {part}\r\n" for part in parts)
    return f"{written}--{_BOUNDARY}--\r\n".encode()


def read_secrets(gateway: TenantGateway, key: str, ids: StoredIds) -> dict[str, bytes]:
    """The stored content by path, as its own tenant reads it."""
    found = {}
    for path in ids.reads():
        answer = gateway.call("GET", path, None, bearer(key))
        assert answer.status == 200, (path, answer.body)
        assert WORD.encode() in answer.body, path
        found[path] = answer.body
    return found
