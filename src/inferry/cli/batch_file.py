"""Requests and results of `inferry run-batch` as files of lines.

Results are written in the order of the requests, so that the results of an interrupted run are a prefix, and the next
run continues behind it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from inferry.domain.storage import BatchError, BatchItem, ItemResult, ItemTry
from inferry.durable.batch_input import parse_lines
from inferry.durable.batch_lines import request_id

PAGE_ITEMS = 16
MAX_WAITING = 4
"""Results that wait for an earlier one, as a multiple of the requests in flight."""


class NotTheSame(Exception):
    """The results do not belong to the requests."""


class RequestFile:
    """The requests, read as they are needed. `fail` takes the errors of lines that are no request, with
    their `custom_id` where they have one.
    """

    def __init__(
        self, file: BinaryIO, endpoint: str, skip: int, fail: Callable[[BatchError, str | None], None]
    ) -> None:
        self._lines = numbered_lines(file)
        self._endpoint = endpoint
        self._fail = fail
        for _ in range(skip):
            next(self._lines)

    async def page(self, after: int) -> list[BatchItem]:
        """The next requests; none behind the last."""
        items: list[BatchItem] = []
        while len(items) < PAGE_ITEMS and (line := next(self._lines, None)) is not None:
            parsed = parse_lines([line], self._endpoint)
            items += parsed.items
            for error in parsed.errors:
                name = _field(line[1], "custom_id")
                self._fail(error, name if isinstance(name, str) else None)
        return items


class ResultFile:
    """Writes results in the order of the requests. `numbers` are those of the requests that have none yet."""

    def __init__(
        self, file: BinaryIO, batch_id: str, numbers: Iterator[int], on_written: Callable[[bool], None]
    ) -> None:
        self._file = file
        self._batch_id = batch_id
        self._numbers = numbers
        self._next = next(numbers, None)
        self._waiting: dict[int, tuple[bool, bytes]] = {}
        self._on_written = on_written

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def record(self, record: ItemResult | ItemTry) -> None:
        if isinstance(record, ItemResult):
            self._add(record.number, record.outcome == "succeeded", record.line)

    async def flush(self) -> None:
        self._file.flush()

    def fail(self, error: BatchError, custom_id: str | None) -> None:
        """The result of a line that is no request."""
        assert error.line is not None
        found = {"code": error.code, "message": error.message}
        id = request_id(self._batch_id, error.line)
        line = {"id": id, "custom_id": custom_id, "response": None, "error": found}
        self._add(error.line, False, msgspec.json.encode(line))

    def _add(self, number: int, is_good: bool, line: bytes) -> None:
        self._waiting[number] = (is_good, line)
        while self._next is not None and self._next in self._waiting:
            is_good, line = self._waiting.pop(self._next)
            self._file.write(line + b"\n")
            self._file.flush()
            self._on_written(is_good)
            self._next = next(self._numbers, None)


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1."""
    return ((number, line.rstrip(b"\r\n")) for number, line in enumerate(file, 1) if line.strip())


def first_endpoint(path: Path) -> str:
    """The `url` of the first request. Raises ValueError."""
    with path.open("rb") as file:
        for _, line in numbered_lines(file):
            url = _field(line, "url")
            if isinstance(url, str) and url.startswith("/"):
                return url
            break
    raise ValueError("the first line has no `url` such as /v1/chat/completions")


def finished_results(requests: Path, results: Path) -> tuple[int, int]:
    """How many results there are, and how many of them are errors. A line that was cut off is removed.

    Raises NotTheSame, and leaves the file as it is, where a line is not the result of its request.
    """
    if not results.exists():
        return 0, 0
    count = failed = end = 0
    with requests.open("rb") as asked, results.open("r+b") as answered:
        numbered = numbered_lines(asked)
        for line in answered:
            _, request = next(numbered, (0, b""))
            is_cut_off = not line.endswith(b"\n")
            if not request or not (line.startswith(b"{") if is_cut_off else _is_result(line, request)):
                raise NotTheSame(f"{results} has results of other requests than {requests}; name another file")
            if is_cut_off:
                break
            count += 1
            failed += not _is_success(line)
            end += len(line)
        answered.truncate(end)
    return count, failed


def _is_result(line: bytes, request: bytes) -> bool:
    """Whether the line is an object with an `id` and the `custom_id` of the request, null where it has none."""
    result = _object(line)
    name = _field(request, "custom_id")
    wanted = name if isinstance(name, str) else None
    return {"id", "custom_id"} <= result.keys() and result["custom_id"] == wanted


def _field(line: bytes, name: str) -> Any:
    return _object(line).get(name)


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; empty where it has none."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_success(line: bytes) -> bool:
    response = _field(line, "response")
    return isinstance(response, dict) and response.get("status_code") == 200
