"""Parameters and headers of the OpenAPI document."""

from typing import Any

from inferry.domain.lanes import Lane

Json = dict[str, Any]

IDENTIFIER: Json = {"type": "string", "pattern": "^[!-~]{1,256}$"}
_NAME: Json = {"type": "string", "pattern": "^[!-~]{0,256}$"}
"""An identifier in a header. An empty one counts as missing."""
_NUMBER: Json = {"type": "integer", "minimum": 0, "maximum": 999_999_999_999}


def parameter(where: str, name: str, schema: Json, description: str) -> Json:
    given: Json = {"in": where, "name": name, "schema": schema, "description": description}
    return {**given, "required": True} if where == "path" else given


def integer_parameter(name: str, minimum: int, maximum: int, default: int, description: str) -> Json:
    return parameter(
        "query", name, {"type": "integer", "minimum": minimum, "maximum": maximum, "default": default}, description
    )


def _header(name: str, schema: Json, description: str) -> Json:
    return parameter("header", name, schema, description)


_LANES: Json = {"type": "string", "enum": [lane.name for lane in Lane]}
_SESSION: Json = {"type": "string"}
HEADERS_IN: dict[str, Json] = {
    one["name"]: one
    for one in (
        _header(
            "x-inferry-lane",
            _LANES,
            "The lane, at most the key's highest. Default: `service_tier`, else the key's lane.",
        ),
        _header("x-inferry-tenant", _NAME, "The tenant, for a gateway without keys; else it must be the key's."),
        _header("x-inferry-run-id", _NAME, "The agent's run. Default: the job's id."),
        _header("x-inferry-step-id", _NAME, "The step of the run. Default: the job's id."),
        _header("x-inferry-parent-run-id", _NAME, "The parent run."),
        _header("idempotency-key", _NAME, "Calls with the same key are repetitions of one call."),
        _header(
            "x-inferry-replay",
            {"type": "string", "enum": ["allow", "never"]},
            "`allow`: keep the response for repetitions. `never`: share nothing.",
        ),
        _header(
            "x-inferry-linger-ms",
            _NUMBER,
            "How long the call continues after its client has disconnected, for a repetition, in milliseconds.",
        ),
        _header("x-inferry-history", {"type": "string", "enum": ["off"]}, "The call's history is not summarised."),
        _header("x-inferry-template-id", _NAME, "The prompt's template. Token counts are learned per template."),
        _header("x-inferry-max-wait-ms", _NUMBER, "Maximum time a job is held to form a batch, in milliseconds."),
        _header(
            "x-inferry-deadline-ms",
            _NUMBER,
            "Milliseconds from arrival. A call that cannot meet it is refused; one still queued then is ended.",
        ),
        _header(
            "x-inferry-ttft-ms-per-1k-tokens",
            _NUMBER,
            "Milliseconds added to the TTFT target for every 1,000 uncached prompt tokens, instead of the lane's.",
        ),
        _header("x-inferry-expected-output-tokens", _NUMBER, "Expected output tokens, a hint for scheduling."),
        _header("x-request-id", _SESSION, "Echoed if it is 1 to 256 printable ASCII characters without spaces."),
        _header("x-claude-code-session-id", _SESSION, "Claude Code's session. The run, without x-inferry-run-id."),
        _header("x-claude-code-agent-id", _SESSION, "Claude Code's sub-agent."),
        _header("x-claude-code-parent-agent-id", _SESSION, "The parent of the sub-agent."),
        _header("session_id", _SESSION, "Codex's session."),
        _header("thread-id", _SESSION, "Codex's thread. The run, without x-inferry-run-id."),
        _header("x-codex-parent-thread-id", _SESSION, "The parent thread."),
        _header("x-session-id", _SESSION, "OpenCode's session. The run, without x-inferry-run-id."),
        _header("x-parent-session-id", _SESSION, "The parent session."),
    )
}

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
HEADERS_OUT: dict[str, Json] = {
    name: {"schema": schema, "description": description}
    for name, schema, description in (
        ("x-request-id", _TEXT, "The client's request id, else the job's id. Errors have it too."),
        ("request-id", _TEXT, "The same id, as the Messages API names it."),
        (
            "x-inferry-token-count",
            {"type": "string", "enum": ["exact", "estimated"]},
            "Whether tokens were counted with the model's tokenizer or estimated from bytes.",
        ),
        ("x-inferry-tools-left-out", _TEXT, "Types of tools in a Responses request that the model did not get."),
        ("x-inferry-lane", _LANES, "The lane of the job."),
        ("x-inferry-path", _TEXT, "Of a composed model: the models that were called, with `>` between them."),
        ("x-inferry-queue-ms", {"type": "number", "minimum": 0}, "Time from arrival until it was sent to the worker."),
        ("x-inferry-batch-size", _COUNT, "Jobs in the same plan, including this one."),
        ("x-inferry-worker", _TEXT, "The worker's name."),
        ("x-inferry-shared-with", _TEXT, "The job of the same tenant whose response this is."),
        ("x-inferry-replayed", {"type": "string", "enum": ["true"]}, "The response was stored before this call."),
        ("x-inferry-history", _TEXT, "The id of the history that a summary replaced in this call."),
        ("x-inferry-stop-reason", _TEXT, "The error code of the budget that ended a non-streaming response early."),
        ("x-inferry-drop-reason", _TEXT, "The error code of a refused valid request."),
        (
            "x-inferry-predicted-wait-ms",
            _COUNT,
            "Predicted wait, where it is the reason of the refusal.",
        ),
        ("retry-after", _COUNT, "When to retry, in seconds."),
        ("retry-after-ms", _COUNT, "When to retry, in milliseconds."),
        ("x-should-retry", {"type": "string", "enum": ["true", "false"]}, "Whether a retry can succeed."),
        *(
            (
                f"x-ratelimit-{what}-{unit}",
                _TEXT if what == "reset" else _COUNT,
                f"{description} Present where there is such a limit.",
            )
            for unit in ("requests", "tokens")
            for what, description in (
                ("limit", f"The caller's limit of {unit} per minute."),
                ("remaining", "The rest of the limit."),
                ("reset", "Time until the limit is fully restored, for example `6m0s`."),
            )
        ),
    )
}
_RATE_LIMIT_HEADERS = tuple(name for name in HEADERS_OUT if name.startswith("x-ratelimit-"))
CALL_HEADERS = (
    *("x-request-id", "x-inferry-lane", "x-inferry-queue-ms", "x-inferry-batch-size", "x-inferry-worker"),
    *("x-inferry-shared-with", "x-inferry-replayed", "x-inferry-stop-reason", "x-inferry-history", "x-inferry-path"),
    *_RATE_LIMIT_HEADERS,
)
REFUSAL_HEADERS = (
    *("x-request-id", "retry-after", "retry-after-ms", "x-should-retry", "x-inferry-drop-reason"),
    *("x-inferry-predicted-wait-ms", *_RATE_LIMIT_HEADERS),
)
REFUSALS = (402, 408, 409, 429, 503)


def headers(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
