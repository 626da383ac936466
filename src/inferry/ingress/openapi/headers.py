"""What stands in headers, queries and paths, for the OpenAPI document."""

from typing import Any

from inferry.domain.lanes import Lane

Json = dict[str, Any]

IDENTIFIER: Json = {"type": "string", "pattern": "^[!-~]{1,256}$"}
_NAME: Json = {"type": "string", "pattern": "^[!-~]{0,256}$"}
"""An identifier in a header, where an empty one is as good as none."""
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
            "x-inferry-lane", _LANES, "The lane; never above the key's highest. Else `service_tier`, else the key's."
        ),
        _header("x-inferry-tenant", _NAME, "Whose call it is where no keys are asked for; else only the key's own."),
        _header("x-inferry-run-id", _NAME, "The agent's run. Default: the job's own id."),
        _header("x-inferry-step-id", _NAME, "The step of the run. Default: the job's own id."),
        _header("x-inferry-parent-run-id", _NAME, "The run that started this one."),
        _header("idempotency-key", _NAME, "Which calls are the same one, made again."),
        _header(
            "x-inferry-replay",
            {"type": "string", "enum": ["allow", "never"]},
            "Keep the answer for the same call, or share nothing.",
        ),
        _header(
            "x-inferry-linger-ms",
            _NUMBER,
            "How long to go on for the same call to come back after its client has left.",
        ),
        _header("x-inferry-template-id", _NAME, "The prompt's template: sizes are learned for each."),
        _header("x-inferry-max-wait-ms", _NUMBER, "The longest hold for company."),
        _header(
            "x-inferry-deadline-ms",
            _NUMBER,
            "From arrival; refused where it cannot be met, ended where it is still queued then.",
        ),
        _header("x-inferry-expected-output-tokens", _NUMBER, "A hint for packing."),
        _header("x-request-id", _SESSION, "Echoed, where it is 1 to 256 printable ASCII characters without spaces."),
        _header("x-claude-code-session-id", _SESSION, "Claude Code's session: the run, where ours is not named."),
        _header("x-claude-code-agent-id", _SESSION, "Its sub-agent."),
        _header("x-claude-code-parent-agent-id", _SESSION, "The sub-agent's own parent."),
        _header("session_id", _SESSION, "Codex's session."),
        _header("thread-id", _SESSION, "Its thread: the run, where ours is not named."),
        _header("x-codex-parent-thread-id", _SESSION, "The thread that started it."),
        _header("x-session-id", _SESSION, "OpenCode's session: the run, where ours is not named."),
        _header("x-parent-session-id", _SESSION, "The session that it came from."),
    )
}

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
HEADERS_OUT: dict[str, Json] = {
    name: {"schema": schema, "description": description}
    for name, schema, description in (
        ("x-request-id", _TEXT, "The client's, or the job's id. On errors too."),
        ("x-inferry-lane", _LANES, "The lane it went in."),
        ("x-inferry-queue-ms", {"type": "number", "minimum": 0}, "From arrival until it was sent to the worker."),
        ("x-inferry-batch-size", _COUNT, "Jobs sent to the worker together with it, itself included."),
        ("x-inferry-worker", _TEXT, "The worker's name."),
        ("x-inferry-shared-with", _TEXT, "The job of the same tenant whose answer this is."),
        ("x-inferry-replayed", {"type": "string", "enum": ["true"]}, "That answer was there before the call."),
        ("x-inferry-stop-reason", _TEXT, "The error code of the budget that ended a whole answer early."),
        ("x-inferry-drop-reason", _TEXT, "The error code, on refusals of what was in order."),
        (
            "x-inferry-predicted-wait-ms",
            _COUNT,
            "How long the call would have waited, where that is why it was refused.",
        ),
        ("retry-after", _COUNT, "When to come back, in seconds."),
        ("retry-after-ms", _COUNT, "The same, exactly."),
        ("x-should-retry", {"type": "string", "enum": ["true", "false"]}, "Whether sending it again can help."),
        *(
            (
                f"x-ratelimit-{what}-{unit}",
                _TEXT if what == "reset" else _COUNT,
                f"{description} Where there is such a limit.",
            )
            for unit in ("requests", "tokens")
            for what, description in (
                ("limit", f"The caller's {unit} per minute."),
                ("remaining", "What is left of them."),
                ("reset", "Until all of it is there again, as `6m0s`."),
            )
        ),
    )
}
_RATE_LIMIT_HEADERS = tuple(name for name in HEADERS_OUT if name.startswith("x-ratelimit-"))
CALL_HEADERS = (
    *("x-request-id", "x-inferry-lane", "x-inferry-queue-ms", "x-inferry-batch-size", "x-inferry-worker"),
    *("x-inferry-shared-with", "x-inferry-replayed", "x-inferry-stop-reason"),
    *_RATE_LIMIT_HEADERS,
)
REFUSAL_HEADERS = (
    *("x-request-id", "retry-after", "retry-after-ms", "x-should-retry", "x-inferry-drop-reason"),
    *("x-inferry-predicted-wait-ms", *_RATE_LIMIT_HEADERS),
)
REFUSALS = (402, 408, 409, 429, 503)


def headers(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
