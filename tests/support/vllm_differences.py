"""How answers of `/v1/messages` and `/v1/responses` differ from those of vLLM's own endpoints.

The pages of the reference have the same rows, and a test compares them. Everything else must be equal.
"""

from typing import Any, NamedTuple

_TAGS = "reasoning in a whole answer, if the model writes the first tag itself and the prompt has reasoning"


class Difference(NamedTuple):
    """`fields` are left out of the comparison wherever they are; `inferry` and `vllm` say what each of them writes."""

    what: str
    inferry: str
    vllm: str
    fields: frozenset[str] = frozenset()


MESSAGES = (
    Difference("`id`", "`msg_` and the id of the job", "`chatcmpl-` and a random number", frozenset({"id"})),
    Difference(
        "`signature` of thinking",
        "the id of the job; empty in `content_block_start`",
        "a random number; absent in `content_block_start`",
        frozenset({"signature"}),
    ),
    Difference("`usage.service_tier`", "the lane", "absent", frozenset({"service_tier"})),
    Difference("`stop_sequence` of a whole answer where none matched", "null", "absent"),
    Difference(
        "`usage` of `message_start`",
        "an estimate of the prompt, with all fields",
        "the prompt's tokens, without the fields of the cache",
    ),
    Difference("a last message of the assistant", "continued by the answer", "followed by another message"),
    Difference(
        "`thinking.budget_tokens`",
        "without effect",
        "a limit; an error where the server has no reasoning parser",
    ),
    Difference(_TAGS, "as vLLM streams it: tags in the text", "apart from the text"),
)
RESPONSES = (
    Difference("ids of responses and items", "the id of the job", "random numbers", frozenset({"id", "item_id"})),
    Difference(
        "the prompt",
        "the chat template alone, as in chat",
        "special tokens of the tokenizer, such as a second BOS, are added to the chat template",
    ),
    Difference(
        "a streamed answer that reached `max_output_tokens`",
        "ends with `response.incomplete`",
        "ends with `response.completed`, with the status `incomplete`",
    ),
    Difference("`status` of the item that was cut off", "`incomplete`", "`completed`"),
    Difference(
        "`arguments` of a whole answer",
        "as the model wrote them",
        "written again from the parsed JSON",
    ),
    Difference("`name` in `response.function_call_arguments.done`", "absent, as in OpenAI's SDK", "present"),
    Difference(
        "`previous_response_id`: function calls and reasoning of the responses before",
        "part of the prompt",
        "left out of the prompt",
    ),
    Difference(_TAGS, "as vLLM streams it: tags in the text", "apart from the text"),
    Difference("`content` of reasoning in `response.output_item.added`", "an empty list, as in messages", "null"),
    Difference("`tool_choice` without tools", "`auto`", "`none`"),
    Difference("`service_tier`", "that of the lane", "`auto`", frozenset({"service_tier"})),
    Difference(
        "`text`, `reasoning`, `metadata`, `top_logprobs` that were not given, `logprobs`",
        "OpenAI's defaults: objects, lists and 0",
        "null",
        frozenset({"reasoning", "metadata", "top_logprobs", "logprobs"}),
    ),
    Difference(
        "`error`, `completed_at`, `store`, `prompt_cache_key`",
        "present, as at OpenAI",
        "absent",
        frozenset({"error", "completed_at", "store", "prompt_cache_key"}),
    ),
    Difference(
        "fields that OpenAI's responses lack: penalties, transfer parameters, `input_messages`, counts per turn, …",
        "absent",
        "present, null where they have no value",
        frozenset(
            {
                *("presence_penalty", "frequency_penalty", "kv_transfer_params", "ec_transfer_params", "prompt"),
                *("input_messages", "output_messages", "phase", "async", "caller", "namespace", "tool_output_tokens"),
                *("input_tokens_per_turn", "cached_tokens_per_turn", "output_tokens_per_turn"),
                *("tool_output_tokens_per_turn", "allowed_callers", "defer_loading", "output_schema", "description"),
            }
        ),
    ),
)


def table(differences: tuple[Difference, ...]) -> str:
    """The differences as the reference pages show them."""
    rows = [f"| {one.what} | {one.inferry} | {one.vllm} |" for one in differences]
    return "\n".join(["| | Inferry | vLLM |", "| --- | --- | --- |", *rows])


def without(value: Any, differences: tuple[Difference, ...]) -> Any:
    """An answer without the fields that differ."""
    fields = frozenset[str]().union(*(one.fields for one in differences))
    if isinstance(value, dict):
        return {key: without(one, differences) for key, one in value.items() if key not in fields}
    return [without(one, differences) for one in value] if isinstance(value, list) else value
