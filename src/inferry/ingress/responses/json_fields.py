"""Parts of a body that are decoded later than the rest, with their path in errors."""

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.errors import printable
from inferry.ingress.openai.decode import validation_error


def decode_field(decoder: msgspec.json.Decoder[Any], raw: Raw | bytes, path: str, kind: str) -> Any:
    """The field at `path`, which must be of the kind. Raises InvalidRequest."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        wrong = validation_error(error)
        if wrong.param is None:
            raise InvalidRequest(f"`{path}` must be {kind}", param=path) from None
        inner = wrong.param if wrong.param.startswith("[") else f".{wrong.param}"
        reason = wrong.message.removeprefix(f"`{wrong.param}`")
        raise InvalidRequest(f"`{path}{inner}`{reason}", param=f"{path}{inner}") from None


def json_string(raw: Raw | UnsetType, path: str) -> bytes:
    """A field that must be a string, as JSON."""
    text = b"" if raw is UNSET else bytes(raw)
    if not text.startswith(b'"'):
        raise InvalidRequest(f"`{path}` must be text", param=path)
    return text


def unsupported(path: str, what: str, kind: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"`{path}`: {what} of the type `{printable(kind)}` are not supported", param=path)
