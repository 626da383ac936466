"""Async jobs as clients and receivers of callbacks see them. Pure."""

from typing import Any

import msgspec

from inferry.domain.async_jobs import AsyncJob


def job_object(job: AsyncJob, answer: bytes | None) -> dict[str, Any]:
    """The job as JSON. `answer` is the body of its response."""
    detail = job.detail
    response = None
    if answer is not None:
        response = {"status_code": job.answer_status, "request_id": job.request_id or "", "body": msgspec.Raw(answer)}
    callback = None
    if job.callback is not None:
        is_pending, is_delivered = job.callback == "pending", job.callback == "delivered"
        callback = {
            "url": detail.callback_url,
            "status": job.callback,
            "attempts": job.callback_attempts,
            "next_attempt_at": _seconds(job.callback_at) if is_pending else None,
            "delivered_at": _seconds(job.callback_at) if is_delivered else None,
        }
    return {
        "id": job.id,
        "object": "job",
        "status": job.status,
        "endpoint": job.endpoint,
        "lane": job.lane,
        "run_id": detail.run_id,
        "step_id": detail.step_id,
        "created_at": int(job.created_at),
        "deadline_at": int(job.deadline),
        "ended_at": _seconds(job.ended_at),
        "expires_at": _seconds(job.expires_at),
        "metadata": detail.metadata,
        "response": response,
        "callback": callback,
    }


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
