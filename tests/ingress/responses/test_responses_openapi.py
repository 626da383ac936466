"""Answers of the Responses API match the OpenAPI document."""

from pathlib import Path
from typing import Any

import msgspec

from inferry.ingress.openapi import response_objects
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import TenantGateway, bearer

RESPONSES = "/v1/responses"
CALL = {"model": "m", "input": "hi"}


def test_responses_match_the_openapi_document(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        key = gateway.key("acme")

        def read(kind: Any, method: str, path: str, body: Any = None) -> Any:
            answer = gateway.call(method, path, body, bearer(key))
            assert answer.status == 200, answer.body
            return msgspec.json.decode(answer.body, type=kind)

        made = read(response_objects.Response, "POST", RESPONSES, CALL)
        queued = read(response_objects.Response, "POST", RESPONSES, {**CALL, "background": True})
        for id in (made.id, queued.id):
            read(response_objects.Response, "GET", f"{RESPONSES}/{id}")
            assert len(read(response_objects.ResponseItems, "GET", f"{RESPONSES}/{id}/input_items").data) == 1
        read(response_objects.Response, "POST", f"{RESPONSES}/{queued.id}/cancel")
        read(response_objects.DeletedResponse, "DELETE", f"{RESPONSES}/{made.id}")
        for more in ({}, {"background": True}):
            answer = gateway.call("POST", RESPONSES, {**CALL, "stream": True, **more}, bearer(key))
            *events, rest = answer.body.decode().split("\n\n")
            assert rest == ""
            found = [
                msgspec.json.decode(one.partition("\ndata: ")[2], type=response_objects.ResponseEvent) for one in events
            ]
            assert found[-1].type == "response.completed"


def test_fields_and_ids_of_clients_are_no_headers_or_paths(tmp_path: Path) -> None:
    """What a client names is not echoed where it could be read as something else."""
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        key = gateway.key("acme")
        tools = [{"type": "web_search\r\nx-evil: 1"}]
        assert gateway.call("POST", RESPONSES, {**CALL, "tools": tools}, bearer(key)).status == 400
        answer = gateway.call("POST", RESPONSES, {**CALL, "tools": [{"type": "web_search"}]}, bearer(key))
        assert answer.headers["x-inferry-tools-left-out"] == "web_search"
        for id in ("%0d%0ax", "..", "a%2Fb", "%00", "resp_%F0%9F%A6%86"):
            assert gateway.call("GET", f"{RESPONSES}/{id}", headers=bearer(key)).status == 404
