"""Work in the database as one runs it: an async job, or an item of a batch. Pure."""

from math import ceil

import msgspec
from msgspec import Struct

from inferry.domain.async_jobs import AsyncJob
from inferry.domain.storage import Batch, BatchItem, item_id
from inferry.durable.execute import StoredCall

BATCH_LANE = "P2"


class StoredWork(Struct, frozen=True, kw_only=True):
    """What a consumer of the work queue executes. Its fields are those of `StoredCall`, `AsyncJob` and `BatchItem`.

    `has_deadline`: the call itself has the deadline, a Unix time.
    """

    id: str
    tenant: str
    key_id: str | None
    path: str
    body: bytes
    run_id: str
    step_id: str
    lane: str
    deadline: float
    headers: dict[str, str] = {}
    has_deadline: bool = False
    tries: int = 0
    is_charged: bool = False

    def call(self, wall: float) -> StoredCall:
        headers = {name.encode(): value.encode("latin-1") for name, value in self.headers.items()}
        if self.has_deadline:
            # Rounded up: the work expires, rather than that its call fails just before.
            headers[b"x-inferry-deadline-ms"] = b"%d" % max(0, ceil(1000 * (self.deadline - wall)))
        return StoredCall(
            tenant=self.tenant,
            key_id=self.key_id,
            path=self.path,
            body=self.body,
            job_id=self.id,
            run_id=self.run_id,
            step_id=self.step_id,
            lane=self.lane,
            headers=headers,
        )


def work_of_job(job: AsyncJob, body: bytes, *, is_charged: bool) -> StoredWork:
    return StoredWork(
        id=job.id,
        tenant=job.tenant,
        key_id=job.key_id,
        path=job.endpoint,
        body=body,
        run_id=job.detail.run_id,
        step_id=job.detail.step_id,
        lane=job.lane,
        deadline=job.deadline,
        headers=job.detail.headers,
        has_deadline=job.detail.has_deadline,
        tries=job.tries,
        is_charged=is_charged,
    )


def work_of_item(batch: Batch, item: BatchItem) -> StoredWork:
    return StoredWork(
        id=item_id(batch.id, item.number),
        tenant=batch.tenant,
        key_id=batch.key_id,
        path=batch.endpoint,
        body=item.body,
        run_id=batch.id,
        step_id=f"item-{item.number}",
        lane=BATCH_LANE,
        deadline=batch.deadline,
        tries=item.tries,
        is_charged=item.is_charged,
    )


def item_of(id: str) -> tuple[str, int] | None:
    """The batch and the number of an item; None for the id of an async job."""
    batch_id, dash, number = id.rpartition("-")
    return (batch_id, int(number)) if dash and number.isascii() and number.isdigit() else None


class _Body(Struct):
    model: str = ""


_body_decoder = msgspec.json.Decoder(_Body)


def model_in(body: bytes) -> str:
    """The model that a request names; empty where it names none."""
    try:
        return _body_decoder.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
