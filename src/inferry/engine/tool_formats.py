"""How models write tool calls, by the name of the format. Pure: chat templates and tokenizers are read elsewhere."""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from inferry.domain.workers import ToolFormatName


class ToolFormat(Struct, frozen=True):
    """The texts around tool calls. A call is an object of the tool's name and its `arguments`.

    Calls are in a group: `begin`, `opening`, calls joined by `separator`, `closing`. Where `has_groups`, each call is
    in a group of its own, and the groups are joined instead. Without a separator an answer has one call. Without
    `begin` a call is the whole answer. `begin_id`: the special token for `begin`, where the tokenizer has one.
    """

    name: ToolFormatName
    begin: str = ""
    opening: str = ""
    arguments: str = "arguments"
    closing: str = ""
    separator: str = ""
    has_groups: bool = False
    begin_id: int | None = None

    def call_start(self, name: str) -> str:
        """The text of a call up to its arguments. A brace ends the call after them."""
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": '

    def text_of(self, calls: Sequence[str]) -> str:
        """The text of an answer with these calls."""
        if self.has_groups:
            return self.separator.join(f"{self.begin}{self.opening}{call}{self.closing}" for call in calls)
        return f"{self.begin}{self.opening}{self.separator.join(calls)}{self.closing}"


_FORMATS = {
    "hermes": ToolFormat("hermes", "<tool_call>", "\n", "arguments", "\n</tool_call>", "\n", has_groups=True),
    "llama3_json": ToolFormat("llama3_json", arguments="parameters"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "[", "arguments", "]", ", "),
}
_MARKS: tuple[tuple[str, ToolFormatName], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)


def format_named(name: ToolFormatName, special_ids: dict[str, int]) -> ToolFormat:
    """`special_ids`: ids of the special tokens by their text."""
    form = _FORMATS[name]
    return replace(form, begin_id=special_ids.get(form.begin))


def format_of_template(template: str, takes_tools: bool) -> ToolFormatName | None:
    """The format that a chat template writes; None where it takes tools and writes another one.

    Tools of a template that takes none are described in the system message, in the format `hermes`.
    """
    if not takes_tools:
        return "hermes"
    return next((name for mark, name in _MARKS if mark in template), None)


def plain_messages(
    messages: Sequence[dict[str, object]], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, object]]:
    """The messages for a template that takes no tools: these are described in the system message, calls are text."""
    plain = [_plain_message(message, form) for message in messages]
    if not tools:
        return plain
    call = f'{{"name": <function name>, "{form.arguments}": <object of its parameters>}}'
    lines = [
        "You may call functions. These are their signatures:",
        *(json.dumps(tool, ensure_ascii=False) for tool in tools),
        "To call a function, answer in this form:",
        form.text_of([call]),
    ]
    about = "\n".join(lines)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{about}"}, *plain[1:]]
    return [{"role": "system", "content": about}, *plain]


def _plain_message(message: dict[str, object], form: ToolFormat) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = [
        f"{form.call_start(call['function']['name'])}{json.dumps(call['function']['arguments'], ensure_ascii=False)}}}"
        for call in calls
    ]
    return {"role": message["role"], "content": f"{message['content']}{form.text_of(texts)}"}
