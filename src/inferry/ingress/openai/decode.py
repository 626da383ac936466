"""Bodies of requests to validated structs."""

import re
from typing import Any, Final, Literal

import msgspec

from inferry.domain.errors import InvalidRequest
from inferry.ingress.openai.message_content import check_contents
from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest, ReservedFields
from inferry.ingress.wire_format import OPENAI, ClientRequest, Endpoint

Api = Literal["chat", "completions"]

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256
MAX_TOKEN_ID: Final = 2**31 - 1
RESERVED_FIELDS: Final = frozenset(ReservedFields.__struct_fields__)

_PATH: Final = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_chat_decoder: Final = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder: Final = msgspec.json.Decoder(CompletionRequest)


class ChatEndpoint(Endpoint):
    format = OPENAI

    def decode(self, body: bytes) -> ClientRequest:
        wire: ChatCompletionRequest = decode_body(_chat_decoder, body)
        check_messages(wire)
        return ClientRequest(wire, body, OPENAI)


def decode_completion(body: bytes) -> CompletionRequest:
    wire: CompletionRequest = decode_body(_completion_decoder, body)
    return wire


def decode_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """The body as the decoder's struct. Raises InvalidRequest."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}") from None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def check_messages(wire: ChatCompletionRequest) -> None:
    if not wire.messages:
        raise InvalidRequest("`messages` must not be empty", param="messages")
    check_contents(wire.messages)


def validation_error(error: msgspec.ValidationError) -> InvalidRequest:
    """The error of msgspec with its path as `param`. No value of the body is quoted."""
    found = _PATH.match(str(error))
    what, path = (found[1], found[2]) if found else (str(error), "")
    if what.startswith("Invalid enum value"):
        # The only message of msgspec that quotes a value.
        what = "not one of the allowed values"
    if path in RESERVED_FIELDS:
        return InvalidRequest(f"`{path}` is set by the gateway and not accepted from clients", param=path)
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"`{param}` is required", param=param)
    where = f"`{path}`: " if path else "the body: "
    return InvalidRequest(f"{where}{what[:1].lower()}{what[1:]}", param=path or None)


def check_ranges(wire: ChatCompletionRequest | CompletionRequest) -> int | None:
    """Refuse values outside their range; return the requested output limit."""
    limit, name = wire.max_tokens, "max_tokens"
    if isinstance(wire, ChatCompletionRequest) and wire.max_completion_tokens is not None:
        limit, name = wire.max_completion_tokens, "max_completion_tokens"
    if limit is not None and limit < 1:
        raise InvalidRequest(f"`{name}` must be at least 1", param=name)
    if limit is not None and limit > MAX_TOKEN_ID:
        raise InvalidRequest(f"`{name}` must be at most {MAX_TOKEN_ID}", param=name)
    if (temperature := wire.temperature) is not None and not 0.0 <= temperature <= 2.0:
        raise _out_of_range("temperature", temperature, 2)
    if (top_p := wire.top_p) is not None and not 0.0 <= top_p <= 1.0:
        raise _out_of_range("top_p", top_p, 1)
    if (min_p := wire.min_p) is not None and not 0.0 <= min_p <= 1.0:
        raise _out_of_range("min_p", min_p, 1)
    if top_p == 0.0:
        raise InvalidRequest("`top_p` must be above 0", param="top_p")
    if wire.top_k is not None and not -1 <= wire.top_k <= MAX_TOKEN_ID:
        raise InvalidRequest(f"`top_k` must be between -1 and {MAX_TOKEN_ID}; -1 and 0 mean no limit", param="top_k")
    if wire.n is not None and not 1 <= wire.n <= 128:
        raise InvalidRequest(f"`n` must be between 1 and 128, got {wire.n}", param="n")
    if wire.seed is not None and not -(2**63) <= wire.seed < 2**63:
        raise InvalidRequest("`seed` must be a signed 64-bit integer", param="seed")
    if (ids := wire.stop_token_ids) and (
        len(ids) > MAX_STOP_TOKEN_IDS or not all(0 <= token <= MAX_TOKEN_ID for token in ids)
    ):
        raise InvalidRequest(f"`stop_token_ids` must be at most {MAX_STOP_TOKEN_IDS} token ids", param="stop_token_ids")
    if wire.stop is not None:
        stops = [wire.stop] if isinstance(wire.stop, str) else wire.stop
        if len(stops) > MAX_STOP_STRINGS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequest(
                f"`stop` must have at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters", param="stop"
            )
    return limit


def _out_of_range(field: str, value: float, maximum: int) -> InvalidRequest:
    return InvalidRequest(f"`{field}` must be between 0 and {maximum}, got {value:g}", param=field)
