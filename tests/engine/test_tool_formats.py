"""How tools, calls and results are rendered, and which format of calls a checkpoint has."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from inferry.domain.workers import ToolFormatName
from inferry.engine.tokenizer import HfTokenizer
from support.grammar_fixtures import write_byte_tokenizer

# What the templates of three families do with tools, shortened.
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- "\\n" }}
{{- tool | tojson }}
{%- endfor %}{{- '\\n</tools>\\n<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}
{%- set tool_call = tool_call.function %}
{%- endif %}{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": dictionary}. ' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}{%- if 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}{{- '{"name": "' + tool_call.name + '", "parameters": ' }}
{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|python_tag|>" if false }}
{%- else %}{{- '[' + message['role'] + ']' + message['content'] }}{%- endif %}{%- endfor %}"""
MISTRAL = """{%- if tools is defined and tools is not none %}{{- "[AVAILABLE_TOOLS] [" }}{%- for tool in tools %}
{{- tool.function | tojson }}{%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}{%- if message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("Tool call IDs should be 9!") }}
{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
{%- endfor %}
{%- elif message["role"] == "tool" %}
{{- '[TOOL_RESULTS] ' + message.content + message.tool_call_id + '[/TOOL_RESULTS]' }}
{%- else %}{{- message["content"] }}{%- endif %}{%- endfor %}"""
TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"Größe": {"type": "integer"}}}},
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"Größe": 7}}}
MESSAGES: list[dict[str, object]] = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "On its way."},
]


def a_tokenizer(directory: Path, template: object, **more: Any) -> HfTokenizer:
    write_byte_tokenizer(directory, 300, ("<|end|>", "[TOOL_CALLS]"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return HfTokenizer(directory, **more)


@pytest.mark.parametrize(
    ("template", "name"), [(QWEN, "hermes"), (LLAMA, "llama3_json"), (MISTRAL, "mistral")], ids=lambda one: one[:9]
)
def test_tools_and_calls_are_rendered_as_by_transformers(tmp_path: Path, template: str, name: ToolFormatName) -> None:
    ours = a_tokenizer(tmp_path, template)
    theirs: Any = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = template
    for tools in ([], [TOOL]):
        expected = theirs.apply_chat_template(MESSAGES, tools=tools or None, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(MESSAGES, tools=tools) == expected
    assert ours.tool_format is not None
    assert ours.tool_format.name == name


def test_a_template_for_tools_is_used_for_calls_with_tools(tmp_path: Path) -> None:
    ours = a_tokenizer(
        tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    )
    assert ours.render_chat(MESSAGES) == "plain"
    assert "look_up" in ours.render_chat(MESSAGES, tools=[TOOL])
    assert ours.tool_format is not None
    assert ours.tool_format.name == "hermes"


def test_an_unknown_format_offers_no_tools_unless_it_is_configured(tmp_path: Path) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert a_tokenizer(tmp_path, template).tool_format is None
    configured = a_tokenizer(tmp_path, template, tool_format="mistral").tool_format
    assert configured is not None
    assert (configured.name, configured.begin_id) == ("mistral", 1)


def test_a_template_without_tools_gets_them_in_the_system_message(tokenizer: HfTokenizer) -> None:
    text = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, *MESSAGES], tools=[TOOL])
    assert text.startswith("<|bos|><|system|>Be brief.\n\nYou may call functions.")
    assert json.dumps(TOOL, ensure_ascii=False) in text
    assert '<|assistant|><tool_call>\n{"name": "look_up", "arguments": {"Größe": 7}}\n</tool_call><|end|>' in text
    assert text.endswith("<|user|>On its way.<|end|><|assistant|>")
    without_system = tokenizer.render_chat(MESSAGES, tools=[TOOL])
    assert without_system.startswith("<|bos|><|system|>You may call functions.")
    assert tokenizer.render_chat(MESSAGES[:1]) == "<|bos|><|user|>Where is it?<|end|><|assistant|>"


def test_a_model_without_a_template_calls_no_tools(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path)
    assert HfTokenizer(tmp_path).tool_format is None
