"""A model that has a sub-agent do the coding task, with the agent tools of Claude Code and of Codex."""

import json
import re

from support.coding_task import PROMPT, SOLVED
from support.model_rules import Asked, Call, Reply, text_of

DELEGATE = "Let another agent do the work."
DELEGATED = "The other agent has repaired it."
SPAWN, WAIT = "multi_agent_v1__spawn_agent", "multi_agent_v1__wait_agent"


def delegate(question: Asked) -> Reply | None:
    """Start a sub-agent, wait for it where that is a call of its own, report its success."""
    messages = question.body["messages"]
    if not any(DELEGATE in text_of(one) for one in messages if one["role"] == "user"):
        return None
    results = [text_of(one) for one in messages if one["role"] == "tool"]
    if any(SOLVED in one for one in results):
        return Reply(DELEGATED)
    if not results:
        if SPAWN in question.tools:
            return Reply(calls=(Call(SPAWN, json.dumps({"message": PROMPT})),))
        return Reply(calls=(Call("Agent", json.dumps({"description": "Repair calc.py", "prompt": PROMPT})),))
    agent = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", results[0])
    if WAIT not in question.tools or agent is None:
        return Reply(f"I do not understand: {results[-1]}")
    return Reply(calls=(Call(WAIT, json.dumps({"targets": [agent[0]], "timeout_ms": 600_000})),))
