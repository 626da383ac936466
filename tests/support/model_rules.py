"""What a scripted model answers. Pure and without randomness: the same request gives the same answer."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A tool call. `arguments` is JSON."""

    name: str
    arguments: str


class Reply(NamedTuple):
    """What the model says: reasoning first, then text, then tool calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


class Asked(NamedTuple):
    """A chat request, as far as rules read it. `text` is that of the last user message."""

    body: dict[str, Any]
    text: str
    tools: dict[str, dict[str, Any]]

    @property
    def last(self) -> dict[str, Any]:
        last: dict[str, Any] = self.body["messages"][-1]
        return last


Rule = Callable[[Asked], Reply | None]
"""The answer, or None to leave the request to the next rule."""


def asked(body: dict[str, Any]) -> Asked:
    users = [text_of(message) for message in body["messages"] if message["role"] == "user"]
    tools = {one["function"]["name"]: one["function"] for one in body.get("tools") or ()}
    return Asked(body, users[-1] if users else "", {} if body.get("tool_choice") == "none" else tools)


def reply(body: dict[str, Any], rules: Sequence[Rule] = ()) -> Reply:
    """The answer of the first rule that has one; `rules` come before the usual ones."""
    question = asked(body)
    for rule in (*rules, forced_call, schema_answer, tool_results, wanted_calls):
        found = rule(question)
        if found is not None:
            break
    else:
        found = Reply(f"Hello! I have read {len(question.text.split())} words. What can I do for you today?")
    return found if found.reasoning else found._replace(reasoning=_reasoning(question))


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


# -- rules -------------------------------------------------------------------------------------------------------------


def forced_call(question: Asked) -> Reply | None:
    """A call of the tool that `tool_choice` names, or of any if it demands one."""
    choice = question.body.get("tool_choice")
    if isinstance(choice, dict):
        return _calls(question, [choice["function"]["name"]])
    if choice == "required":
        return wanted_calls(question) or _calls(question, list(question.tools)[:1])
    return None


def schema_answer(question: Asked) -> Reply | None:
    """JSON for a schema. For `json_object` the keys are the words in quotes."""
    body = question.body
    wanted = body.get("response_format") or {}
    schema = (body.get("structured_outputs") or {}).get("json") or body.get("guided_json")
    if wanted.get("type") == "json_schema":
        schema = wanted["json_schema"]["schema"]
    elif wanted.get("type") == "json_object":
        keys = re.findall(r"['\"](\w+)['\"]", question.text)
        schema = {"properties": {key: {"type": "string"} for key in keys}, "required": keys}
    if schema is None:
        return None
    return Reply(json.dumps(Filler(question.text, schema).value(schema), ensure_ascii=False))


def tool_results(question: Asked) -> Reply | None:
    """The results of the last tool calls, in a sentence."""
    if question.last["role"] != "tool":
        return None
    results: list[str] = []
    for message in reversed(question.body["messages"]):
        if message["role"] != "tool":
            break
        results.insert(0, text_of(message))
    return Reply(f"The tool says: {' / '.join(results)}")


def wanted_calls(question: Asked) -> Reply | None:
    """Calls of the tools that the user names, in full or by a word of the name. "Twice" calls the tool two times;
    "in parallel" calls every tool."""
    if not question.tools or question.last["role"] == "tool":
        return None
    text = question.text.lower()
    named = [name for name in question.tools if re.search(rf"\b{re.escape(name.lower())}\b", text)]
    named = named or [name for name in question.tools if any(word in text for word in _words(name))]
    if "in parallel" in text:
        named = named if len(named) > 1 else list(question.tools)
    if not named:
        return None
    if len(named) == 1 and re.search(r"\btwice\b|\btwo calls\b", text):
        named *= 2
    return _calls(question, named)


def _calls(question: Asked, names: list[str]) -> Reply:
    """One filler for all calls, so that the next call takes the next value of the text."""
    fillers: dict[str, Filler] = {}
    calls = []
    for name in names:
        schema = question.tools[name].get("parameters") or {}
        filler = fillers.setdefault(name, Filler(question.text, schema))
        calls.append(Call(name, json.dumps(filler.value(schema) or {}, ensure_ascii=False)))
    is_single = question.body.get("parallel_tool_calls") is False
    return Reply(calls=tuple(calls[:1] if is_single else calls))


def _words(name: str) -> list[str]:
    """Words of a tool's name that say what it does."""
    words = re.split(r"[_\-.]|(?<=[a-z])(?=[A-Z])", name)
    return [word.lower() for word in words if len(word) > 3 and word.lower() not in ("tool", "function", "with")]


def _reasoning(question: Asked) -> str:
    """Reasoning where the request asks for it."""
    body = question.body
    by_template = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
    by_effort = body.get("reasoning_effort") not in (None, "none")
    by_text = "think" in question.text.lower()
    return "Let me think about this step by step." if by_template or by_effort or by_text else ""


# -- values for schemas ------------------------------------------------------------------------------------------------


class Filler:
    """Values for a JSON schema, taken from a text in order: numbers, words in quotes, names."""

    def __init__(self, text: str, root: dict[str, Any]) -> None:
        self._text = text
        self._root = root
        self._numbers = _cycle(re.findall(r"-?\d+(?:\.\d+)?", text) or ["1"])
        quoted = re.findall(r"['\"]([^'\"]+)['\"]", text)
        names = re.findall(r"(?<=[a-z,] )[A-Z][\w]*(?: [A-Z][\w]*)*(?:, [A-Z]{2}\b)?", text)
        self._strings = _cycle(quoted or names or [text.strip() or "value"])

    def value(self, schema: dict[str, Any]) -> Any:
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            named = [one for one in schema["enum"] if str(one).lower() in self._text.lower()]
            return (named or schema["enum"])[0]
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        if kind == "object" or "properties" in schema:
            return {name: self.value(one) for name, one in (schema.get("properties") or {}).items()}
        match kind:
            case "integer":
                return int(float(next(self._numbers)))
            case "number":
                return float(next(self._numbers))
            case "boolean":
                return True
            case "array":
                return [self.value(schema.get("items") or {"type": "string"})]
            case "null":
                return None
        return next(self._strings)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            found: Any = self._root
            for key in schema["$ref"].removeprefix("#/").split("/"):
                found = found[key]
            return self._resolved(found)
        for many in ("anyOf", "oneOf", "allOf"):
            if many in schema:
                return self._resolved(next((one for one in schema[many] if one.get("type") != "null"), {}))
        return schema


def _cycle(values: list[str]) -> Iterator[str]:
    while True:
        yield from values
