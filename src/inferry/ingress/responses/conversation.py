"""The items of a request's input as chat messages. `instructions` and developer messages are system text.

Reasoning of earlier answers goes back to the engine where it can be read: as text, or as the `encrypted_content` that
the gateway itself has written. Encrypted reasoning of others is left out: no engine here can read it.
"""

import base64
import binascii

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.chat_messages import ChatMessages
from inferry.ingress.responses.json_fields import decode_field, json_string, unsupported
from inferry.ingress.responses.request_schema import InputItem, Part
from inferry.ingress.responses.tools import chat_name, text_arguments

_parts_decoder = msgspec.json.Decoder(list[Part])
_encode = msgspec.json.encode
_QUOTE = 0x22
_SYSTEM_ROLES = ("system", "developer")
_SEALED = "inferry:"


def sealed_reasoning(text: str) -> str:
    """Reasoning as `encrypted_content`: opaque, so that clients send it back unchanged. It is not a secret."""
    return _SEALED + base64.b64encode(text.encode()).decode()


class Conversation:
    """Collects items. `features` are (feature, path) for media in the request."""

    def __init__(self) -> None:
        self.messages = ChatMessages()
        self.features: list[tuple[str, str]] = []

    def add_instructions(self, instructions: Raw | UnsetType) -> None:
        if instructions is not UNSET and bytes(instructions) != b"null":
            self.messages.add_system(json_string(instructions, "instructions"))

    def add(self, item: InputItem, path: str) -> None:
        match item.type:
            case "message" | None:
                self._add_message(item, path)
            case "function_call":
                arguments = json_string(item.arguments, f"{path}.arguments")
                self.messages.add_tool_call(_call_id(item, path), _tool_name(item, path), arguments)
            case "custom_tool_call":
                arguments = text_arguments(json_string(item.input, f"{path}.input"))
                self.messages.add_tool_call(_call_id(item, path), _tool_name(item, path), arguments)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, path)
            case "reasoning":
                self._add_reasoning(item, path)
            case _:
                raise unsupported(path, "items", item.type)

    def _add_message(self, item: InputItem, path: str) -> None:
        path = f"{path}.content"
        for index, part in enumerate(_parts(item.content, path)):
            where = f"{path}[{index}]"
            if item.role in _SYSTEM_ROLES:
                self.messages.add_system(_text(part, where))
            elif item.role == "assistant":
                self.messages.add_assistant(_text(part, where))
            elif item.role != "user":
                raise InvalidRequest(f"`{path}`: unknown role", param=path)
            elif part.type in ("input_text", "output_text", "text"):
                self.messages.add_user(_text(part, where))
            else:
                self._add_media(part, where)

    def _add_output(self, item: InputItem, path: str) -> None:
        call_id = _call_id(item, path)
        path = f"{path}.output"
        texts: list[bytes] = []
        media: list[tuple[Part, str]] = []
        for index, part in enumerate(_parts(item.output, path)):
            where = f"{path}[{index}]"
            if part.type in ("input_text", "output_text", "text"):
                texts.append(_text(part, where)[1:-1])
            else:  # the results of tools are text in chat requests
                media.append((part, where))
        self.messages.add_tool_result(call_id, b'"%b"' % b"\\n".join(texts))
        for part, where in media:
            self._add_media(part, where)

    def _add_reasoning(self, item: InputItem, path: str) -> None:
        path = f"{path}.content"
        texts = [] if item.content is UNSET or bytes(item.content) == b"null" else _parts(item.content, path)
        for index, part in enumerate(texts):
            self.messages.add_reasoning(json_string(part.text, f"{path}[{index}].text"))
        sealed = item.encrypted_content
        if not texts and sealed is not None and sealed.startswith(_SEALED):
            try:
                text = base64.b64decode(sealed[len(_SEALED) :], validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                raise InvalidRequest("the `encrypted_content` was changed", param=path) from None
            self.messages.add_reasoning(_encode(text))

    def _add_media(self, part: Part, path: str) -> None:
        if part.type == "input_image":
            if part.image_url is UNSET:
                raise UnsupportedFeature(f"`{path}`: only `image_url` is supported", param=path)
            self.features.append(("images", f"{path}.image_url"))
            detail = b"" if part.detail is None else b',"detail":' + _encode(part.detail)
            url = json_string(part.image_url, f"{path}.image_url")
            self.messages.add_user_part(b'{"type":"image_url","image_url":{"url":%b%b}}' % (url, detail))
        elif part.type == "input_file":
            if part.file_data is UNSET:
                raise UnsupportedFeature(f"`{path}`: only `file_data` is supported", param=path)
            self.features.append(("files", f"{path}.file_data"))
            data = json_string(part.file_data, f"{path}.file_data")
            name = _encode(part.filename or "file")
            self.messages.add_user_part(b'{"type":"file","file":{"filename":%b,"file_data":%b}}' % (name, data))
        elif part.type == "input_audio" and part.input_audio is not UNSET:
            self.features.append(("audio_input", f"{path}.input_audio"))
            audio = bytes(part.input_audio)
            self.messages.add_user_part(b'{"type":"input_audio","input_audio":%b}' % audio)
        else:
            raise unsupported(path, "parts", part.type)


def _parts(content: Raw | UnsetType, path: str) -> list[Part]:
    """The parts of a content: a string is one part."""
    if content is UNSET:
        raise InvalidRequest(f"`{path}` is required", param=path)
    if memoryview(content)[0] == _QUOTE:
        return [Part("text", text=content)]
    parts: list[Part] = decode_field(_parts_decoder, content, path, "text or a list of parts")
    return parts


def _text(part: Part, path: str) -> bytes:
    if part.type == "refusal":
        return json_string(part.refusal, f"{path}.refusal")
    if part.type not in ("input_text", "output_text", "text"):
        raise unsupported(path, "parts", part.type)
    return json_string(part.text, f"{path}.text")


def _call_id(item: InputItem, path: str) -> str:
    if not item.call_id:
        raise InvalidRequest(f"`{path}.call_id` is required", param=f"{path}.call_id")
    return item.call_id


def _tool_name(item: InputItem, path: str) -> str:
    if not item.name:
        raise InvalidRequest(f"`{path}.name` is required", param=f"{path}.name")
    return chat_name(item.name, item.namespace)
