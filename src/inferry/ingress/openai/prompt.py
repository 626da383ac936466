"""The prompt of a request: token ids, or text to tokenise."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw

from inferry.domain.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.ingress.openai.constraints import offered_tools
from inferry.ingress.openai.decode import MAX_TOKEN_ID, validation_error
from inferry.ingress.openai.features import is_given
from inferry.ingress.openai.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    MessageToolCall,
    RawMessages,
)

_messages_decoder: Final = msgspec.json.Decoder(list[Message])
_calls_decoder: Final = msgspec.json.Decoder(list[MessageToolCall])
_arguments_decoder: Final = msgspec.json.Decoder(dict[str, Any])
_raw_messages_decoder: Final = msgspec.json.Decoder(RawMessages)


class PromptText(NamedTuple):
    """A prompt of `size` bytes that `encode` tokenises."""

    size: int
    encode: Callable[[], list[int]]


def read_prompt(
    wire: ChatCompletionRequest | CompletionRequest, body: bytes, card: ModelCard, tokenizer: Tokenizer | None
) -> list[int] | PromptText | None:
    """Token ids where the client sent them, text where there is a tokenizer for it, else None."""
    if isinstance(wire, ChatCompletionRequest):
        if tokenizer is None:
            return None
        messages = _messages(body, takes_tools="tools" in card.features)
        size = sum(len(str(message["content"]).encode()) for message in messages)
        _check_prompt_fits(size, tokenizer, card, "messages")
        continues = wire.continue_final_message is True
        encode = partial(tokenizer.encode_chat, messages, continues_last=continues)
        if wire.tools is not UNSET and is_given(wire.tools):
            size += len(bytes(wire.tools))
            encode = partial(encode, tools=offered_tools(wire.tools, wire.tool_choice))
        return PromptText(size, encode)
    prompt = completion_prompt(wire.prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            return None
        size = len(prompt.encode())
        _check_prompt_fits(size, tokenizer, card, "prompt")
        return PromptText(size, partial(tokenizer.encode, prompt))
    max_id = MAX_TOKEN_ID if card.vocab_size is None else card.vocab_size - 1
    if min(prompt) < 0 or max(prompt) > max_id:
        raise InvalidRequest(f"`prompt` has a token id outside 0 to {max_id}", param="prompt")
    return prompt


def _check_prompt_fits(size: int, tokenizer: Tokenizer, card: ModelCard, param: str) -> None:
    """Refuse a prompt that cannot fit the context, before time is spent on tokenising it."""
    least_tokens = size // tokenizer.longest_token_bytes
    if card.context_tokens is not None and least_tokens > card.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has at least {least_tokens} tokens; the context of `{card.name}` is "
            f"{card.context_tokens} tokens",
            param=param,
        ).with_tokens(least_tokens, None, card.context_tokens)


def _messages(body: bytes, *, takes_tools: bool) -> list[dict[str, object]]:
    """The messages with text contents, for a chat template."""
    try:
        messages = _messages_decoder.decode(_raw_messages_decoder.decode(body).messages)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        wrong = validation_error(error)
        param = f"messages{wrong.param or ''}"
        raise InvalidRequest(f"`{param}` must be text or a list of text parts", param=param) from None
    plain: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is UNSET:
                    param = f"messages[{index}].content"
                    raise UnsupportedFeature(f"`{param}`: only text parts are supported", param=param)
            content = "".join(str(part.text) for part in content)
        named: dict[str, object] = {"role": message.role, "content": content or ""}
        if message.tool_calls is not UNSET and is_given(message.tool_calls):
            param = f"messages[{index}].tool_calls"
            if not takes_tools:
                raise UnsupportedFeature(f"`{param}`: tools are not supported by this model", param=param)
            named["tool_calls"] = _tool_calls(message.tool_calls, param)
        if takes_tools and message.tool_call_id is not None:
            named["tool_call_id"] = message.tool_call_id
        if takes_tools and message.name is not None:
            named["name"] = message.name
        plain.append(named)
    return plain


def _tool_calls(raw: Raw, param: str) -> list[dict[str, object]]:
    """Calls as chat templates take them: with their arguments as objects."""
    try:
        calls = _calls_decoder.decode(raw)
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments_decoder.decode(call.function.arguments or "{}"),
                },
            }
            for call in calls
        ]
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest(
            f"`{param}` must be calls of functions, each with an id, a name and a JSON object as arguments", param=param
        ) from None


def completion_prompt(raw: Raw) -> str | list[int]:
    """Text or token ids. Raises InvalidRequest."""
    try:
        prompt: Any = msgspec.json.decode(raw, type=str | list[int | str | list[int]])
    except msgspec.ValidationError:
        raise InvalidRequest("`prompt` must be text or a list of token ids", param="prompt") from None
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts are one request each
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise InvalidRequest("`prompt` must be text or a list of token ids", param="prompt")
    if not prompt:
        raise InvalidRequest("`prompt` must not be empty", param="prompt")
    return prompt  # type: ignore[no-any-return]
