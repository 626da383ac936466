"""Calls made up from the OpenAPI document, by schemathesis: whatever comes, the answer is one that the document names.

Tried are values at and beyond every bound, fields left out and made up, methods that are not there, calls without keys,
and sequences of calls that follow from each other. FUZZ_EXAMPLES asks for more than the few of every test run, and
FUZZ_PATHS, a regular expression, for some paths only.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inferry.ingress.openapi import document as openapi
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import ADMIN_KEY, CHAT, TenantGateway, bearer

SEED = int(os.environ.get("FUZZ_SEED", "20250"))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
PATHS = os.environ.get("FUZZ_PATHS", "")
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def of_this_gateway() -> dict[str, Any]:
    """The document with names that mean something here, so that calls get past the question who is meant."""
    document: dict[str, Any] = json.loads(openapi.render_document())
    bodies = ("ChatCompletionRequest", "CompletionRequest", "MessagesRequest", "CountTokensRequest", "ResponsesRequest")
    for body in bodies:
        document["components"]["schemas"][body]["properties"]["model"]["enum"] = ["m"]
    # A key says whose it is, and any other name is refused.
    document["components"]["parameters"]["x-inferry-tenant"]["schema"] = {"type": "string", "enum": ["acme"]}
    return document


def config(key: str) -> str:
    return f"""
seed = {SEED}
request-timeout = 120.0
continue-on-failure = true
[auth.openapi.bearer]
bearer = "{key}"
[auth.openapi.api_key]
api_key = "{key}"
[auth.openapi.admin]
bearer = "{ADMIN_KEY}"
[checks.positive_data_acceptance]
enabled = false  # not everything that is wrong with a call can be said in a schema
[checks.missing_required_header]
enabled = false  # without the admin key it is 403; that calls without keys are refused is a check of its own
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]  # a deadline of some milliseconds may pass while the call runs
[checks.negative_data_rejection]
expected-statuses = ["4xx"]  # a deadline of no time comes before a field that nobody knows
[phases.examples]
enabled = false
[generation]
max-examples = {EXAMPLES or 6}
no-shrink = true
database = "none"
[[operations]]
include-path-regex = "completions$|messages|responses$"
phases.coverage.enabled = {str(bool(EXAMPLES)).lower()}  # a thousand cases, for all their headers
phases.coverage.checks.negative_data_rejection.enabled = false  # a header that nobody knows is not refused
"""


@pytest.mark.timeout(3600 if EXAMPLES else 900)
def test_every_response_matches_the_openapi_document(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker()], {})) as gateway:
        key = gateway.key("acme")
        (tmp_path / "openapi.json").write_text(json.dumps(of_this_gateway()))
        (tmp_path / "schemathesis.toml").write_text(config(key))
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "--config-file",
            "schemathesis.toml",
            "run",
            "openapi.json",
        ]
        only = ("--include-path-regex", PATHS) if PATHS else ()
        found = subprocess.run(
            [*command, "--url", gateway.url, "--no-color", "--warnings", "off", *only],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=3500 if EXAMPLES else 850,
        )
        assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2000:]
        while gateway.service.gateway.in_flight or gateway.metric("inferry_open_streams"):
            time.sleep(0.01)  # the last client has its answer a moment before it is written off
        gateway.as_admin("POST", "/admin/workers/scripted/readmit")
        last = gateway.key("last")
        assert gateway.call("POST", CHAT, CALL, bearer(last)).status == 200
