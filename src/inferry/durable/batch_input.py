"""Lines of an input file to items of a batch. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from inferry.domain.storage import BatchError, BatchItem

MAX_ERRORS = 100
"""Errors that are reported for one file."""
MAX_CUSTOM_ID_CHARS = 512


class _Line(Struct):
    custom_id: str
    method: str
    url: str
    body: Raw


class _Body(Struct):
    stream: object | UnsetType = UNSET
    background: object | UnsetType = UNSET


_line_decoder = msgspec.json.Decoder(_Line)
_body_decoder = msgspec.json.Decoder(_Body)


class LineSplitter:
    """Chunks of a file to its lines, numbered from 1. Memory is bounded by the longest line allowed."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""
        self._number = 0

    def feed(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """The complete lines that are not blank. Raises LineTooLong."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = [(self._number + index, line) for index, line in enumerate(lines, 1) if line.strip()]
        self._number += len(lines)
        if any(len(line) > self._max_line_bytes for line in (self._rest, *lines)):
            raise LineTooLong(self._max_line_bytes)
        return found

    def end(self) -> list[tuple[int, bytes]]:
        """The last line, where no line break ends it."""
        return [(self._number + 1, self._rest)] if self._rest.strip() else []


class LineTooLong(Exception):
    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"a line exceeds {max_bytes} bytes")


class ParsedLines(NamedTuple):
    items: list[BatchItem]
    errors: list[BatchError]


def parse_lines(lines: Sequence[tuple[int, bytes]], endpoint: str) -> ParsedLines:
    """The items of numbered lines, with the numbers of their lines. Errors quote nothing of a line."""
    parsed = ParsedLines([], [])
    for number, line in lines:
        found = _parse_line(line, endpoint)
        if isinstance(found, _Line):
            parsed.items.append(BatchItem(number, found.custom_id, bytes(found.body)))
        else:
            parsed.errors.append(msgspec.structs.replace(found, line=number))
    return parsed


def _parse_line(line: bytes, endpoint: str) -> _Line | BatchError:
    try:
        found = _line_decoder.decode(line)
    except msgspec.ValidationError as error:
        return BatchError("invalid_request", _without_values(str(error)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BatchError("invalid_json_line", "this line is not valid JSON")
    if found.method != "POST":
        return BatchError("invalid_method", "`method` must be POST", param="method")
    if found.url != endpoint:
        return BatchError("mismatched_endpoint", f"`url` must be the endpoint of the batch, {endpoint}", param="url")
    if (problem := custom_id_error(found.custom_id)) is not None:
        return BatchError("invalid_custom_id", problem, param="custom_id")
    if (problem := body_error(bytes(found.body))) is not None:
        return BatchError("invalid_request", problem, param="body")
    return found


def custom_id_error(custom_id: str) -> str | None:
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        return f"`custom_id` must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
    if "\0" in custom_id:
        return "`custom_id` must not contain the NUL character"
    return None


def body_error(body: bytes) -> str | None:
    """What is wrong with the body of any endpoint; the endpoint itself checks the rest when the item runs."""
    try:
        found = _body_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "`body` must be a JSON object"
    if _is_set(found.stream):
        return "`stream` is not supported in batches"
    if _is_set(found.background):  # the item would end before its work
        return "`background` is not supported in batches"
    return None


def _is_set(value: object) -> bool:
    return value is not UNSET and value is not None and value is not False


def duplicates(repeated: Sequence[BatchItem]) -> list[BatchError]:
    """Errors of items whose custom id is taken."""
    message = "`custom_id` is used by an earlier request"
    return [BatchError("duplicate_custom_id", message, item.number, "custom_id") for item in repeated]


def _without_values(text: str) -> str:
    what, _, where = text.partition(" - at ")
    return f"{what[:1].lower()}{what[1:]}" + (f" at {where}" if where else "")
