"""A request as Codex 0.166 sends it, with shorter texts and fewer tools."""

from typing import Any

THREAD = "01a1e388-6502-7791-9ce1-932449fb973b"
HEADERS = {
    "x-codex-beta-features": "remote_compaction_v2",
    "x-codex-window-id": f"{THREAD}:0",
    "x-codex-turn-metadata": '{"agent_name":"/root","request_kind":"turn"}',
    "x-client-request-id": THREAD,
    "session-id": THREAD,
    "thread-id": THREAD,
    "accept": "text/event-stream",
    "originator": "codex_exec",
}


def message(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


def function(name: str, **properties: str) -> dict[str, Any]:
    fields = {name: {"type": kind} for name, kind in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {
        "type": "function",
        "name": name,
        "description": f"Does {name}.",
        "strict": False,
        "parameters": parameters,
    }


AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for spawning and managing sub-agents.",
    "tools": [function("close_agent", target="string"), function("spawn_agent", message="string")],
}


def request(*more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The first call of a session, with further items of its history."""
    return {
        "model": "m",
        "input": [
            message("developer", "You are a coding agent running in the Codex CLI."),
            message("developer", "<skills_instructions>…</skills_instructions>", "<apps>…</apps>"),
            message("user", "<environment_context>…</environment_context>"),
            message("user", "say hi"),
            *more,
        ],
        "tools": [
            function("exec_command", cmd="string"),
            AGENTS,
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": THREAD,
        "client_metadata": {"thread_id": THREAD, "x-codex-turn-metadata": "{}"},
        **fields,
    }
