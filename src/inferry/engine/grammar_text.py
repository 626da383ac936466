"""A constraint as a grammar of llguidance: Lark, with JSON schemas in it. Pure.

White space between the tokens of JSON is at most one space, or one line break with an indentation. Without a limit, a
model could write white space until its output limit.
"""

import json
import re
from typing import Any

from inferry.domain.constraints import Constraint
from inferry.engine.tool_formats import ToolFormat

_WHITE_SPACE = r"( |\n[ \t]{0,20})?"
_MAX_GRAMMAR_CHARS = 65_536
_MAX_GBNF_CHARS = 16_384
_MAX_REFERENCES = 1_000
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
_ESCAPE_OR_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


class GrammarTooLarge(ValueError):
    """A size of the constraint is above its limit. The message names the limit and quotes nothing."""


def grammar_text(constraint: Constraint, form: ToolFormat | None) -> str:
    """The grammar of an output. `form`: how the model writes tool calls. Raises ValueError."""
    if constraint.tools:
        if form is None:
            raise ValueError("the model has no known format of tool calls")
        return _lark(_with_tools(constraint, form))
    if constraint.lark is not None:
        if len(constraint.lark) > _MAX_GRAMMAR_CHARS:
            raise GrammarTooLarge(f"the grammar has more than {_MAX_GRAMMAR_CHARS} characters")
        return constraint.lark
    return _lark([f"start: {_text_rule(constraint)}"])


def is_gbnf(grammar: str) -> bool:
    """Whether the grammar is in llama.cpp's format. Raises GrammarTooLarge: its conversion is slow."""
    if _LARK.search(grammar) is not None:
        return False
    if len(grammar) > _MAX_GBNF_CHARS:
        raise GrammarTooLarge(f"a grammar in GBNF has at most {_MAX_GBNF_CHARS} characters")
    return True


def _text_rule(constraint: Constraint) -> str | None:
    """What the text must match; None for free text."""
    if constraint.schema is not None:
        return _json(constraint.schema, constraint.is_strict)
    if constraint.regex is not None:
        return f"/{_ESCAPE_OR_SLASH.sub(_escaped, constraint.regex)}/"
    return " | ".join(map(_quoted, constraint.choices)) or None


def _with_tools(constraint: Constraint, form: ToolFormat) -> list[str]:
    """Calls, or text: free, or what the constraint says. Free text may precede the first call and never follows one."""
    begin = "" if not form.begin else _quoted(form.begin) if form.begin_id is None else f"<[{form.begin_id}]>"
    rules = [
        f'tool_{index}: {_quoted(form.call_start(tool.name))} {_json(tool.schema, tool.is_strict)} "}}"'
        for index, tool in enumerate(constraint.tools)
    ]
    rules.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(constraint.tools))))
    is_parallel = constraint.is_parallel and bool(form.separator)
    calls, groups = "tool", "rest"
    if is_parallel and form.has_groups:
        groups = f"rest ({_quoted(form.separator)} {begin} rest)*"
    elif is_parallel:
        calls = f"tool ({_quoted(form.separator)} tool)*"
    opening, closing = (_quoted(text) if text else "" for text in (form.opening, form.closing))
    # Some tokenizers write a space after a special token.
    space = '" "?' if form.begin_id is not None else ""
    rules.append(f"rest: {space} {opening} {calls} {closing}")
    text = _text_rule(constraint)
    if constraint.must_call:
        rules.append(f"start: {begin} {groups}")
    elif text is not None:
        rules.append(f"start: {text} | {begin} {groups}")
    elif form.begin:
        rules.append(f"start: TEXT | lead {groups}")
        rules.append(f"lead{'[lazy]' if form.begin_id is None else ''}: TEXT {begin}")
        rules.append(r"TEXT: /(.|\n)*/")
    else:
        rules.append(f"start: TEXT | {groups}")
        rules.append(r"TEXT: /([^{](.|\n)*)?/")
    return rules


def _json(schema: str, is_strict: bool) -> str:
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": not is_strict}
    decoded: dict[str, Any] = json.loads(schema)
    _check_size(decoded)
    return "%json " + json.dumps({**decoded, "x-guidance": options})


def _check_size(schema: dict[str, Any]) -> None:
    """Bound the recursion of the compiler along chains of references, which may lead to any place in the schema."""
    parts: list[Any] = [schema]
    references: set[str] = set()
    for part in parts:  # grows
        if isinstance(part, dict):
            references.add(str(part.get("$ref")))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    if len(references) > _MAX_REFERENCES:
        raise GrammarTooLarge(f"the schema has references to more than {_MAX_REFERENCES} places")


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lark(rules: list[str]) -> str:
    return "\n".join(["%llguidance {}", *rules, ""])
