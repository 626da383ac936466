"""Features of a request that not every worker supports."""

from operator import attrgetter
from typing import Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.errors import UnsupportedFeature
from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest

_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields for structured outputs besides `response_format`."""
_ENGINE_FIELDS: Final = (
    "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words", "logits_processors",
    "truncate_prompt_tokens", "thinking_token_budget", "chat_template", "chat_template_kwargs", "documents",
)  # fmt: skip
"""Fields of vLLM that change the prompt or the output, each a feature of its own."""
_DEFAULTS: Final = {"include_stop_str_in_output": b"false", "skip_special_tokens": b"true"}
_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_WHOLE_FOR_SOME: Final = ("echo", "suffix")
"""Features that some servers have in whole answers alone."""
_NO_TOOL = (b'"none"', b'"auto"')
_COMMON = (
    "n", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens",
    "prompt_logprobs", "echo", "use_beam_search", "response_format", "logprobs", *_GRAMMARS,
    *_ENGINE_FIELDS,
)  # fmt: skip
_CHAT = ("top_logprobs", "tools", "tool_choice", "functions", "modalities", "audio", "continue_final_message")
# Most calls use none of these fields: one comparison shows it.
_of_chat: Final = attrgetter(*_COMMON, *_CHAT)
FEATURE_FIELDS: Final = frozenset((*_COMMON, *_CHAT))
"""Fields of chat completions of which a value may ask for a feature."""
_of_completion: Final = attrgetter(*_COMMON, "suffix", "best_of")
_NO_CHAT_FEATURES: Final = _of_chat(ChatCompletionRequest(model="", messages=[]))
_NO_COMPLETION_FEATURES: Final = _of_completion(CompletionRequest(model="", prompt=Raw()))


def features_of(wire: ChatCompletionRequest | CompletionRequest) -> list[tuple[str, str]]:
    """(feature, parameter) for every such feature that the request uses."""
    found: list[tuple[str, str]] = []
    if isinstance(wire, ChatCompletionRequest):
        if _of_chat(wire) == _NO_CHAT_FEATURES:
            return found
    elif _of_completion(wire) == _NO_COMPLETION_FEATURES:
        return found
    if wire.n is not None and wire.n > 1:
        found.append(("n", "n"))
    if wire.logit_bias is not UNSET and is_given(wire.logit_bias):
        found.append(("logit_bias", "logit_bias"))
    if wire.presence_penalty:
        found.append(("penalties", "presence_penalty"))
    if wire.frequency_penalty:
        found.append(("penalties", "frequency_penalty"))
    if wire.repetition_penalty is not None and wire.repetition_penalty != 1:
        found.append(("penalties", "repetition_penalty"))
    if wire.min_p:
        found.append(("min_p", "min_p"))
    if wire.min_tokens:
        found.append(("min_tokens", "min_tokens"))
    if wire.prompt_logprobs is not None:
        found.append(("prompt_logprobs", "prompt_logprobs"))
    if wire.echo:
        found.append(("chat_echo" if isinstance(wire, ChatCompletionRequest) else "echo", "echo"))
    if wire.use_beam_search:
        found.append(("beam_search", "use_beam_search"))
    if wire.response_format is not None and wire.response_format.type != "text":
        found.append(("structured_outputs", "response_format"))
    for param in _GRAMMARS:
        raw: Raw | UnsetType = getattr(wire, param)
        if raw is not UNSET and is_given(raw):
            found.append(("structured_outputs", param))
    found += _engine_fields(wire)
    if isinstance(wire, ChatCompletionRequest):
        found += _chat_fields(wire)
    else:
        if wire.logprobs is not None:
            found.append(("logprobs", "logprobs"))
        if wire.suffix:
            found.append(("suffix", "suffix"))
        if wire.stream is True:
            found += [(f"streamed_{name}", name) for name, _ in found if name in _WHOLE_FOR_SOME]
        if wire.best_of is not None and wire.best_of > 1:
            found.append(("n", "best_of"))
    return found


def _chat_fields(wire: ChatCompletionRequest) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if wire.logprobs:
        found.append(("logprobs", "logprobs"))
    if wire.top_logprobs is not None and not wire.logprobs:
        found.append(("logprobs", "top_logprobs"))
    if wire.tools is not UNSET and is_given(wire.tools):
        found.append(("tools", "tools"))
    elif (choice := wire.tool_choice) is not UNSET and is_given(choice) and bytes(choice) not in _NO_TOOL:
        found.append(("tools", "tool_choice"))
    if wire.functions is not UNSET and is_given(wire.functions):
        found.append(("tools", "functions"))
    if wire.continue_final_message:
        found.append(("prefill", "continue_final_message"))
    for param, raw in (("modalities", wire.modalities), ("audio", wire.audio)):
        if raw is not UNSET and is_given(raw) and bytes(raw) != b'["text"]':
            found.append(("audio", param))
    return found


def _engine_fields(wire: ChatCompletionRequest | CompletionRequest) -> list[tuple[str, str]]:
    values: list[tuple[str, Raw | UnsetType]] = [(param, getattr(wire, param)) for param in _ENGINE_FIELDS]
    return [
        (param, param)
        for param, raw in values
        if raw is not UNSET and is_given(raw) and bytes(raw) != _DEFAULTS.get(param)
    ]


def check_fields(
    wire: ChatCompletionRequest | CompletionRequest, body: bytes, fields: frozenset[str], model: str
) -> None:
    """Refuse, by name, what the model's server would ignore in silence. Raises UnsupportedFeature."""
    for name, value in _fields_decoder.decode(body).items():
        if name not in fields and is_given(value):
            raise UnsupportedFeature(f"`{name}` is not supported by the model `{model}`", param=name)
    if isinstance(wire, CompletionRequest) and not bytes(wire.prompt).startswith(b'"'):
        raise UnsupportedFeature(f"`prompt` must be text for the model `{model}`", param="prompt")


def is_given(raw: Raw | UnsetType) -> bool:
    return raw is not UNSET and bytes(raw) not in (b"null", b"[]", b"{}")
