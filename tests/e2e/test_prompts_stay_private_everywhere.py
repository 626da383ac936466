"""No prompt and no output of an API, composed model or pipeline is in logs, metrics, operators' pages or the ledger."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.reports import REPORTS
from support.pooling import pools
from support.pooling_gateway import PoolingGateway
from support.tenant_gateway import CHAT, TenantGateway, bearer
from support.two_models import TwoModelGateway, chat
from support.upstream import Upstream

CANARY = "canary-9b2e71"
REFUSE, BREAK = "refuse-this", "break-this"
RUN = "run-of-all"


def shown(gateway: TenantGateway, tenant: dict[str, str]) -> str:
    """What operators see of the calls: metrics, reports, diagnosis, dashboard and timelines."""
    gateway.run(asyncio.to_thread(gateway.service.gateway._recorder.flush, 60))
    now = time.time()
    periods = f"?since={now - 3600}&before_since={now - 7200}"
    reports = [f"/admin/reports/{name}{periods if name == 'compare' else '?limit=1000'}" for name in REPORTS]
    pages = ["/admin/diagnosis", "/admin/overview", "/admin/workers", "/admin/alerts", "/admin/scale", "/admin/reports"]
    found = [gateway.as_admin("GET", page) for page in (*pages, *reports, *(f"{one}&format=csv" for one in reports))]
    own = (f"/v1/runs/{RUN}{more}" for more in ("", "/timeline", "/timeline?format=perfetto"))
    found += [gateway.call("GET", page, None, tenant) for page in ("/metrics", "/v1/models", *own)]
    assert [answer.status for answer in found] == [200] * len(found), [one.body for one in found if one.status != 200]
    return "\n".join(json.dumps(answer.headers) + answer.body.decode() for answer in found)


def assert_not_in_the_ledger(directory: Path) -> None:
    content = b"".join(path.read_bytes() for path in directory.iterdir())
    assert RUN.encode() in content
    assert CANARY.encode() not in content


class ComposedGateway(TwoModelGateway):
    """Both models quote the prompt, and fail for two words in it: with 400 as a bad request, and with 500."""

    async def _script(self, upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = json.dumps(body)
        for word, status in ((REFUSE, 400), (BREAK, 500)):
            if word in text:
                return web.json_response({"error": {"message": f"cannot do {text}", "param": CANARY}}, status=status)
        return await super()._script(upstream, request, body)


STAGE = {"kind": "generate", "model": "small", "messages": [{"content": "{{ input.text }}"}], "max_tokens": 16}
CONFIG: dict[str, Any] = {
    "health": {"failure_threshold": 1000},  # the calls that break answers are to reach the engines
    "routes": {
        "sorted": {"classify": {"model": "small", "labels": {"easy": "small", "hard": "large"}}, "default": "large"}
    },
    "cascades": {
        "pair": {
            "small": "small",
            "large": "large",
            "shadow": 1,
            "accept": {"verifier": {"model": "large", "prompt": "Is it right?"}},
        }
    },
    "ensembles": {"panel": {"models": ["small", "large", "small"]}},
    "pipelines": {
        "steps": {
            "inputs": {"text": {}},
            "chat_input": "text",
            "stages": {"draft": STAGE, "answer": {**STAGE, "messages": [{"content": "Again: {{ draft }}"}]}},
        }
    },
    "prices": {"small": {"input": 1.0, "output": 1.0}, "large": {"input": 10.0, "output": 10.0}},
}


def test_messages_composed_models_and_pipelines_leave_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    run = {"x-inferry-run-id": RUN, "x-inferry-tenant": "acme", "x-inferry-step-id": "step"}
    with ComposedGateway(tmp_path, CONFIG) as gateway:
        gateway.answers = {"small": f"Small {CANARY}", "large": f"Large {CANARY}"}
        statuses = set()
        for text in (CANARY, f"{CANARY} {REFUSE}", f"{CANARY} {BREAK}"):
            for model in ("small", "sorted", "pair", "panel", "steps"):
                for stream in (False, True):
                    statuses.add(gateway.call("POST", CHAT, chat(model, text, stream=stream), run).status)
            asked = {"model": "small", "max_tokens": 8, "messages": [{"role": "user", "content": text}], "system": text}
            statuses.add(gateway.call("POST", "/v1/messages", asked, run).status)
            statuses.add(gateway.call("POST", "/v1/messages/count_tokens", asked, run).status)
            statuses.add(gateway.call("POST", "/v1/pipelines/steps", {"input": {"text": text}}, run).status)
        for path, wrong in (
            ("/v1/messages", {"model": "small", "max_tokens": CANARY, "messages": [CANARY]}),
            ("/v1/messages/count_tokens", {"model": "small", "messages": [{"role": CANARY, "content": CANARY}]}),
            ("/v1/pipelines/steps", {"input": {"text": 1, CANARY: CANARY}}),
            (CHAT, chat("panel", CANARY, n=CANARY)),
        ):
            assert gateway.call("POST", path, wrong, run).status in (400, 422)
        assert statuses >= {200, 400}
        assert any(status >= 500 for status in statuses)
        pages = shown(gateway, {"x-inferry-tenant": "acme"})
    assert CANARY not in pages
    assert CANARY not in caplog.text
    assert_not_in_the_ledger(tmp_path)


async def pools_or_quotes(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    text = json.dumps(body)
    for word, status in ((REFUSE, 400), (BREAK, 500)):
        if word in text:
            return web.json_response({"error": {"message": f"cannot do {text}", "param": CANARY}}, status=status)
    return await pools(upstream, request, body)


def test_pooled_inputs_leave_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with PoolingGateway(tmp_path, script=pools_or_quotes) as gateway:
        headers = {**bearer(gateway.key("acme")), "x-inferry-run-id": RUN}
        for text in (CANARY, f"{CANARY} {REFUSE}", f"{CANARY} {BREAK}"):
            calls: list[tuple[str, dict[str, Any]]] = [
                ("/v1/embeddings", {"input": [text, CANARY]}),
                ("/v1/rerank", {"query": text, "documents": [CANARY, {"text": text}]}),
                ("/v1/score", {"text_1": text, "text_2": [CANARY, text]}),
                ("/v1/classify", {"input": [text, CANARY]}),
            ]
            found = [gateway.call("POST", path, {"model": "m", **body}, headers).status for path, body in calls]
            assert all((status == 200) == (text == CANARY) for status in found), found
        for path, body in (
            ("/v1/embeddings", {"input": {CANARY: CANARY}}),
            ("/v1/rerank", {"query": [CANARY], "documents": CANARY}),
            ("/v1/score", {"text_1": {CANARY: 1}, "text_2": CANARY}),
            ("/v1/classify", {"input": CANARY, "use_activation": CANARY}),
        ):
            wrong = gateway.call("POST", path, {"model": "m", **body}, headers)
            assert wrong.status == 400
            assert CANARY not in wrong.body.decode()
        pages = shown(gateway, headers)
    assert CANARY not in pages
    assert CANARY not in caplog.text
    assert_not_in_the_ledger(tmp_path)
