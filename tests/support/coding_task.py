"""A coding task for agents with a shell tool, and the model that solves it: read two files, fix one, run the test.

The model decides by the results of its tool calls, so that an agent which loses or changes a result does not finish.
"""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from support.http_gateway import HttpGateway
from support.model_rules import Asked, Call, Reply, Rule, text_of
from support.node_clients import LIMIT_S
from support.scripted_model import CONTEXT_TOKENS, ScriptedModel
from support.tenant_gateway import bearer
from support.upstream import Upstream, begin, chunk, role

PROMPT = "The program check.py fails because of calc.py. Repair calc.py and run check.py."
SOLVED = "Repaired: check.py passes."
BROKEN = "def add(a, b):\n    return a - b\n"
CHECK = "from calc import add\n\nassert add(2, 3) == 5\nprint('all', 'good')\n"
SHELLS = ("Bash", "exec_command", "shell_command", "shell")


def write_files(directory: Path) -> None:
    (directory / "calc.py").write_text(BROKEN)
    (directory / "check.py").write_text(CHECK)


def solve(question: Asked) -> Reply | None:
    """The next step of the task. A call without a shell tool (a title, a summary) is left to other rules."""
    name = next((one for one in SHELLS if one in question.tools), None)
    messages = question.body["messages"]
    if name is None or not any(PROMPT in text_of(one) for one in messages if one["role"] == "user"):
        return None
    # By their order and not by their ids, as a model reads them whose chat template writes no ids.
    results = [text_of(one) for one in messages if one["role"] == "tool"]

    def shell(*commands: str) -> tuple[Call, ...]:
        return tuple(Call(name, json.dumps(_arguments(question.tools[name], one))) for one in commands)

    match len(results):
        case 0:
            return Reply("I read both files.", shell("cat calc.py", "cat check.py"), "The files say what is wrong.")
        case 2 if "return a - b" in results[0] and "assert add(2, 3)" in results[1]:
            return Reply("", shell("sed -i 's/a - b/a + b/' calc.py && echo 'now repaired'"))
        case 3 if "now repaired" in results[2]:
            return Reply("", shell("python3 check.py"))
        case 4 if "all good" in results[3]:
            return Reply(SOLVED)
    return Reply(f"I cannot go on after {len(results)} results: {results[-1]}")


def _arguments(tool: dict[str, Any], command: str) -> dict[str, Any]:
    """The arguments of a shell tool: every agent names and types its command differently."""
    properties = tool["parameters"]["properties"]
    key = "cmd" if "cmd" in properties else "command"
    value: Any = ["bash", "-c", command] if properties[key].get("type") == "array" else command
    return {key: value, **({"description": "A step of the task"} if "description" in properties else {})}


class CodingGateway(HttpGateway):
    """A gateway before the model that solves the task. With `stalls` no stream ends."""

    def __init__(self, directory: Path, *rules: Rule) -> None:
        self._model = ScriptedModel([*rules, solve])
        self.stalls = False
        self.stalled = threading.Event()
        self.left = threading.Event()
        """Set when the gateway has left a stalled stream."""
        super().__init__(directory, self._script)
        self.upstream.context_tokens = CONTEXT_TOKENS

    async def _script(self, upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not self.stalls:
            return await self._model.script(upstream, request, body)
        response = await begin(request)
        for piece in (role(), chunk("Working"), chunk(" on it")):
            await response.write(piece)
        self.stalled.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return response

    def ended_runs(self, key: str) -> list[dict[str, Any]]:
        """The details of all runs of the key's tenant, once the ledger has all their calls."""
        until = time.monotonic() + LIMIT_S
        while True:
            listed = self.call("GET", "/v1/runs", headers=bearer(key)).json["data"]
            runs = [self.call("GET", f"/v1/runs/{quote(one['id'], '')}", headers=bearer(key)).json for one in listed]
            if runs and all(
                len(one["latest_steps"]) == one["jobs"]["ended"] and one["jobs"]["in_flight"] == 0 for one in runs
            ):
                return runs
            assert time.monotonic() < until, runs
            time.sleep(0.02)
