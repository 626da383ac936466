"""Calls made up from the OpenAPI document, by schemathesis: whatever comes, the answer is one that the document names.

Tried are values at and beyond every bound, fields left out and made up, methods that are not there, calls without keys,
and sequences of calls that follow from each other. Calls also name stored objects of another tenant, whose content is
searched for in every answer. FUZZ_EXAMPLES asks for more than the few of every test run, and
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
from support.pooling_worker import PoolingWorker
from support.stored_secrets import WORD, StoredIds, read_secrets, store_secrets
from support.tenant_gateway import ADMIN_KEY, CHAT, TenantGateway, bearer

SEED = int(os.environ.get("FUZZ_SEED", "20250"))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
PATHS = os.environ.get("FUZZ_PATHS", "")
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


MODEL_BODIES = (
    *("ChatCompletionRequest", "CompletionRequest", "MessagesRequest", "CountTokensRequest", "ResponsesRequest"),
    *("EmbeddingRequest", "ClassifyRequest", "ScoreRequest", "RerankRequest"),
)
CALLABLE = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score")
SEARCH = f"""
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):
    # An administrator may delete the other tenant's content and keys.
    if case.path.startswith("/admin/") and set(case.path_parameters.values()) & {{"globex", "THEIR_KEY"}}:
        case.path_parameters = dict.fromkeys(case.path_parameters, "somebody")

@schemathesis.check
def nothing_of_another_tenant(ctx, response, case):
    if b"{WORD}" in response.content or "{WORD}" in str(response.headers):
        raise AssertionError("the answer has content of another tenant")
"""


def of_this_gateway(theirs: StoredIds) -> dict[str, Any]:
    """The document with names that mean something here, so that calls get past the question who is meant.

    Where an id is asked for, it may be that of an object of another tenant.
    """
    document: dict[str, Any] = json.loads(openapi.render_document())
    schemas = document["components"]["schemas"]
    for body in MODEL_BODIES:
        schemas[body]["properties"]["model"]["enum"] = ["m"]
    schemas["CreateJobBody"]["properties"]["endpoint"]["enum"] = list(CALLABLE)
    also(schemas["CreateBatchBody"]["properties"], "input_file_id", theirs.file)
    also(schemas["ResponsesRequest"]["properties"], "previous_response_id", theirs.response)
    ids = {
        "/v1/files/{id}": [theirs.file, theirs.output],
        "/v1/batches/{id}": [theirs.batch],
        "/v1/responses/{id}": [theirs.response],
        "/v1/jobs/{id}": [theirs.job],
        "/v1/messages/batches/{id}": [theirs.message_batch],
        "/v1/runs/{id}": [theirs.batch, theirs.job],
    }
    for path, operations in document["paths"].items():
        found = [one for prefix, some in ids.items() if path.startswith(prefix) for one in some]
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if found and parameter.get("in") == "path":
                    also(parameter, "schema", *found)
    # A key says whose it is, and any other name is refused.
    document["components"]["parameters"]["x-inferry-tenant"]["schema"] = {"type": "string", "enum": ["acme"]}
    return document


def also(schemas: dict[str, Any], name: str, *values: str) -> None:
    """Let a schema permit some values by name, beside those that it permits."""
    schemas[name] = {"anyOf": [schemas[name], {"type": "string", "enum": list(values)}]}


def config(key: str) -> str:
    return f"""
hooks = "./search.py"
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
include-path-regex = "completions$|messages|responses$|embeddings$|classify$|score$|rerank$|jobs$"
phases.coverage.enabled = {str(bool(EXAMPLES)).lower()}  # a thousand cases each, for all their headers
phases.coverage.checks.negative_data_rejection.enabled = false  # a header that nobody knows is not refused
[[operations]]
include-path-regex = "callback-secrets$"
checks.use_after_free.enabled = false  # they belong to a tenant's name, whether it is configured or not
"""


@pytest.mark.timeout(3600 if EXAMPLES else 900)
def test_every_response_matches_the_openapi_document(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([PoolingWorker()], {})) as gateway:
        key, other = gateway.key("acme"), gateway.key("globex")
        theirs = store_secrets(gateway, other)
        secrets = read_secrets(gateway, other, theirs)
        (tmp_path / "openapi.json").write_text(json.dumps(of_this_gateway(theirs)))
        (tmp_path / "search.py").write_text(SEARCH.replace("THEIR_KEY", other.split("_")[1]))
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
        assert read_secrets(gateway, other, theirs) == secrets
        last = gateway.key("last")
        assert gateway.call("POST", CHAT, CALL, bearer(last)).status == 200
