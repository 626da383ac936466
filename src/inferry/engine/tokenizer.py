"""Tokenizer and chat template of a model directory."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from inferry.domain.errors import InvalidRequest
from inferry.domain.workers import ToolFormatName
from inferry.engine.tool_formats import ToolFormat, format_named, format_of_template, plain_messages

_CACHED_TEXTS = 1 << 15


class HfTokenizer:
    """`domain.ports.Tokenizer` over tokenizer.json, tokenizer_config.json and an optional chat_template.jinja.

    Rule: a prompt never begins with two BOS tokens. Errors never quote user data.
    """

    def __init__(self, model_dir: Path, tool_format: ToolFormatName | None = None) -> None:
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{model_dir} has no tokenizer.json")
        self._fast: Any = FastTokenizer.from_file(str(path))
        self._fast.no_padding()
        self._fast.no_truncation()
        config = _read_json(model_dir / "tokenizer_config.json")
        self._special = {
            name: _token_text(config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name) is not None
        }
        bos = self._special.get("bos_token")
        self._bos_id: int | None = None if bos is None else self._fast.token_to_id(bos)
        self.longest_token_bytes = max((len(token.encode()) for token in self._fast.get_vocab()), default=1)
        plain, for_tools = _template_sources(model_dir, config)
        environment = _environment()
        self._template = None if plain is None else environment.from_string(plain)
        self._tool_template = None if for_tools is None else environment.from_string(for_tools)
        self._takes_tools = for_tools is not None and "tools" in find_undeclared_variables(environment.parse(for_tools))
        self.tool_format = self._tool_format(for_tools or "", tool_format)
        parts = json.dumps([config, plain, for_tools, tool_format], sort_keys=True)
        self.fingerprint = blake2b(path.read_bytes() + parts.encode(), digest_size=12).hexdigest()

    @property
    def fast(self) -> Any:
        """The tokenizer of the `tokenizers` package."""
        return self._fast

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def vocab_size(self) -> int:
        return int(self._fast.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        ids = self._encode(text, add_special_tokens=True)
        doubled = self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled else ids

    def encode_pair(self, text: str, other: str) -> list[int]:
        ids: list[int] = self._fast.encode_batch_fast([(text, other)], add_special_tokens=True)[0].ids
        return ids

    def render_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        continues_last: bool = False,
        tools: Sequence[dict[str, object]] = (),
    ) -> str:
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        plain = [_with_plain_content(message) for message in messages]
        try:
            if self.tool_format is not None and not self._takes_tools:
                plain = plain_messages(plain, tools, self.tool_format)
            text = template.render(
                messages=plain, tools=tools or None, add_generation_prompt=not continues_last, **self._special
            )
        except _TemplateRaised as error:
            # The message of the template, for example that roles must alternate. Templates do not quote user data.
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages ({type(error).__name__})", param="messages"
            ) from None
        return _up_to_last(text, str(plain[-1]["content"])) if continues_last else text

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        continues_last: bool = False,
        tools: Sequence[dict[str, object]] = (),
    ) -> list[int]:
        text = self.render_chat(messages, continues_last=continues_last, tools=tools)
        # The template writes BOS where the model needs one.
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call for one text: unlike `encode` it releases the GIL.
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _tool_format(self, template: str, name: ToolFormatName | None) -> ToolFormat | None:
        """The format with this name, else that of the chat template; None where there is none."""
        found = name or (format_of_template(template, self._takes_tools) if template else None)
        added = self._fast.get_added_tokens_decoder()
        special_ids = {token.content: id for id, token in added.items() if token.special}
        return None if found is None else format_named(found, special_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=True)
        return text


class HfTokenTexts:
    """Texts of the tokens of a tokenizer, special ones included. Thread-safe."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._fast = tokenizer.fast
        # Decoders treat the start of a text specially, for example drop a space.
        self._before: list[int] = self._fast.encode("a", add_special_tokens=False).ids[:1]
        self._before_text = self.decode(self._before)
        self.text = lru_cache(_CACHED_TEXTS)(self._text)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _text(self, token_id: int) -> str:
        """The text of one token in the middle of a text."""
        text = self.decode([*self._before, token_id])
        return text[len(self._before_text) :] if text.startswith(self._before_text) else self.decode([token_id])


class _TemplateRaised(TemplateError):
    """A template has called raise_exception."""


def _up_to_last(text: str, content: str) -> str:
    """The rendered messages without what the template writes behind the content of the last."""
    for wanted in (content, content.strip()):  # many templates strip contents
        end = text.rfind(wanted) + len(wanted)
        if end >= len(wanted):
            return text[:end]
    raise InvalidRequest("the chat template changes the last message, so it cannot be continued", param="messages")


def _with_plain_content(message: dict[str, object]) -> dict[str, object]:
    """Text parts joined to one string, as templates of text models expect."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest("message content must consist of text parts", param="messages")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise _TemplateRaised(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    extensions: list[str | type[Extension]] = [loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _template_sources(model_dir: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The template of chats, and that of chats with tools, which may be another one."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(), path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default"), named.get("tool_use", named.get("default"))
    return (template, template) if isinstance(template, str) else (None, None)


def _token_text(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return loaded
