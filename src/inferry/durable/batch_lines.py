"""Results of items as lines of JSON: what output files, error files and result streams consist of. Pure."""

from typing import Any

import msgspec

from inferry.domain.storage import Batch, BatchItem, ItemOutcome, ItemResult
from inferry.durable.execute import CallAnswer

_NEVER_RAN = {
    "canceled": ("batch_cancelled", "the batch was cancelled before this request was executed"),
    "expired": ("batch_expired", "this request could not be executed before the completion window expired"),
}


def result_of(batch: Batch, item: BatchItem, answer: CallAnswer) -> ItemResult:
    """The result of an item that ran."""
    is_good = 200 <= answer.status < 300
    body = _one_line(answer.body)
    if body is None:
        is_good, body = False, _failure(batch)
    line: dict[str, Any]
    if batch.api == "anthropic":
        result = {"type": "succeeded", "message": body} if is_good else {"type": "errored", "error": body}
        line = {"custom_id": item.custom_id, "result": result}
    else:
        line = {
            "id": request_id(batch.id, item.number),
            "custom_id": item.custom_id,
            "response": {"status_code": answer.status, "request_id": answer.request_id or "", "body": body},
            "error": None,
        }
    return ItemResult(batch.id, item.number, "succeeded" if is_good else "errored", msgspec.json.encode(line))


def line_of(batch: Batch, item: ItemOutcome) -> bytes:
    """The line of an item that has ended, with its line break."""
    if item.line is not None:
        return item.line + b"\n"
    line: dict[str, Any]
    if batch.api == "anthropic":
        line = {"custom_id": item.custom_id, "result": {"type": item.outcome}}
    else:
        code, message = _NEVER_RAN[item.outcome]
        error = {"code": code, "message": message}
        line = {
            "id": request_id(batch.id, item.number),
            "custom_id": item.custom_id,
            "response": None,
            "error": error,
        }
    return msgspec.json.encode(line) + b"\n"


def request_id(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.rpartition('_')[2]}_{number}"


def _one_line(body: bytes) -> msgspec.Raw | None:
    """The body without line breaks; None where it is no JSON, because the call broke off."""
    try:
        return msgspec.Raw(body if b"\n" not in body and body else msgspec.json.format(body, indent=-1))
    except msgspec.DecodeError:
        return None


def _failure(batch: Batch) -> msgspec.Raw:
    message = "the call broke off without an answer"
    if batch.api == "anthropic":
        return msgspec.Raw(
            msgspec.json.encode(
                {"type": "error", "error": {"type": "api_error", "message": message}, "request_id": None}
            )
        )
    error = {"message": message, "type": "server_error", "param": None, "code": "internal_error"}
    return msgspec.Raw(msgspec.json.encode({"error": error}))
