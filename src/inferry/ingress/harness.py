"""Which run a call belongs to: from our own headers, else from those that agent harnesses send anyway.

Claude Code names its session on every call, a sub-agent beside it, and the sub-agent's own parent where that is one,
too. Codex names a session and a thread of it; a thread that another one started names that. OpenCode's sub-agents are
sessions that name the session they came from.

Their ids get a prefix and cannot meet each other's, nor by accident those that people choose: `claude-code:<session>`,
`claude-code:<session>/<agent>` (agents are named within their session), `codex:<thread>`, and `session:<session>` for
OpenCode, whose header others use as well. What is malformed in them is passed over, since no client wrote it for us;
what is malformed in our own is refused.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from inferry.ingress.headers import identifier

Headers = Mapping[bytes, bytes]

# Without slashes, which join them, and short enough for a prefix and two of them to be an identifier.
_HARNESS_ID = re.compile(rb"[\x21-\x2e\x30-\x7e]{1,100}")


class RunIdentity(NamedTuple):
    """Whose a call is. `session` is only a hint: calls of one session have much in common."""

    run_id: str
    step_id: str
    parent_run: str | None
    session: str | None


class _HarnessRun(NamedTuple):
    run_id: str
    parent: str | None
    session: str


def identity(headers: Headers, job_id: str) -> RunIdentity:
    """Run, step, parent and session of a call. What nobody names has the job's own id. Raises InvalidRequest.

    Our own run id stands alone. Without one the harness says which run it is; our parent header then names what the
    harness's first run belongs to, so that an orchestrator can own all that an agent does.
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
    # The first thread of a session has its name, or none of its own.
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
