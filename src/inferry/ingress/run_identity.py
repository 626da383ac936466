"""The run of a call: from `x-inferry-*` headers, else from the headers of known agent harnesses.

Claude Code sends its session on every call, with the sub-agent and the sub-agent's parent where there are any. Codex
sends a session and a thread, and the parent thread of a thread that another one started. A sub-agent of OpenCode is a
session that names its parent session.

Ids of harnesses get a prefix, so that they cannot collide with each other or with ids that users choose:
`claude-code:<session>`, `claude-code:<session>/<agent>`, `codex:<thread>`, and `session:<session>` for OpenCode, whose
header other clients send too. Malformed ids of harnesses are ignored, because they were not meant for Inferry;
malformed `x-inferry-*` ids are refused.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from inferry.domain.values import Value
from inferry.ingress.headers import identifier

Headers = Mapping[bytes, bytes]

# Without the slash that joins two of them, and short enough for a prefix and two of them to be an identifier.
_HARNESS_ID: Final = re.compile(rb"[\x21-\x2e\x30-\x7e]{1,100}")


class RunIdentity(Value):
    """The run, step and parent of a call. `session` is a hint for affinity: calls of one session share prefixes."""

    def __init__(self, run_id: str, step_id: str, parent_run: str | None, session: str | None) -> None:
        self.run_id: Final = run_id
        self.step_id: Final = step_id
        self.parent_run: Final = parent_run
        self.session: Final = session


class _HarnessRun(NamedTuple):
    run_id: str
    parent: str | None
    session: str


def identity(headers: Headers, job_id: str) -> RunIdentity:
    """Run, step, parent and session of a call; run and step default to the job's id. Raises InvalidRequest.

    `x-inferry-run-id` overrides the harness. Without it the run is the harness's, and `x-inferry-parent-run-id` is the
    parent of the harness's root run, so that an orchestrator can own all runs of an agent.
    """
    step_id = identifier(headers, b"x-inferry-step-id") or job_id
    run_id = identifier(headers, b"x-inferry-run-id")
    parent = identifier(headers, b"x-inferry-parent-run-id")
    found = _claude_code(headers) or _codex(headers) or _opencode(headers)
    if found is None:
        return RunIdentity(run_id or job_id, step_id, parent, None)
    if run_id is not None:
        return RunIdentity(run_id, step_id, parent, found.session)
    if parent == found.run_id:
        parent = None
    return RunIdentity(found.run_id, step_id, found.parent or parent, found.session)


def _claude_code(headers: Headers) -> _HarnessRun | None:
    session = _harness_header(headers, b"x-claude-code-session-id")
    if session is None:
        return None
    root = f"claude-code:{session}"
    agent = _harness_header(headers, b"x-claude-code-agent-id")
    if agent is None:
        return _HarnessRun(root, None, root)
    parent = _harness_header(headers, b"x-claude-code-parent-agent-id")
    return _HarnessRun(f"{root}/{agent}", root if parent is None or parent == agent else f"{root}/{parent}", root)


def _codex(headers: Headers) -> _HarnessRun | None:
    session = _harness_header(headers, b"session_id") or _harness_header(headers, b"session-id")
    thread = _harness_header(headers, b"thread-id") or session
    if thread is None:
        return None
    # The first thread of a session has the id of the session, or none.
    parent = _harness_header(headers, b"x-codex-parent-thread-id") or session
    return _HarnessRun(
        f"codex:{thread}", None if parent in (None, thread) else f"codex:{parent}", f"codex:{session or thread}"
    )


def _opencode(headers: Headers) -> _HarnessRun | None:
    session = _harness_header(headers, b"x-session-id")
    if session is None:
        return None
    parent = _harness_header(headers, b"x-parent-session-id")
    run_id = f"session:{session}"
    return _HarnessRun(run_id, None if parent in (None, session) else f"session:{parent}", run_id)


def _harness_header(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None or _HARNESS_ID.fullmatch(value) is None else value.decode("ascii")
