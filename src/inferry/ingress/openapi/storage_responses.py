"""Bodies of files and batches, for the OpenAPI document only. Times of OpenAI's objects are seconds since 1970."""

from typing import Any, Literal

from msgspec import Struct


class UploadForm(
    Struct, forbid_unknown_fields=True, rename={"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"}
):
    """A file to store."""

    file: bytes
    purpose: Literal["batch", "user_data"]
    anchor: Literal["created_at"] | None = None
    seconds: int | None = None


class File(Struct, forbid_unknown_fields=True):
    """A file. `batch_output` are files that the gateway wrote."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output", "user_data"]
    status: Literal["processed"]


class FileList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFileError(Struct, forbid_unknown_fields=True):
    """Why an input file is invalid. `line` counts from 1."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[BatchFileError]


class RequestCounts(Struct, forbid_unknown_fields=True):
    total: int
    completed: int
    failed: int


class BatchObject(Struct, forbid_unknown_fields=True):
    """A batch. `expires_at` is when its unfinished requests end. Its id is also the id of its run."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchCounts(Struct, forbid_unknown_fields=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Struct, forbid_unknown_fields=True):
    """A message batch. Times are RFC 3339. Its id is also the id of its run."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchList(Struct, forbid_unknown_fields=True):
    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["message_batch_deleted"]


class MessageBatchResult(Struct, forbid_unknown_fields=True):
    """One line of the results. `result` has the `type` succeeded, errored, canceled or expired."""

    custom_id: str
    result: dict[str, Any]


class DeletedTenantData(Struct, forbid_unknown_fields=True):
    """How many objects were deleted. `documents` are stored responses."""

    name: str
    documents: int
    files: int
    batches: int
    jobs: int


class HistoryObject(Struct, forbid_unknown_fields=True):
    """The messages that a summary covers, as they were, and the summary. Times are seconds since 1970."""

    id: str
    object: Literal["history"]
    created_at: int
    expires_at: int | None
    model: str
    summary: str
    messages: list[dict[str, Any]]


class DeletedHistory(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["history.deleted"]
    deleted: Literal[True]
