"""Async jobs of tenants, with answers and the delivery log of callbacks, in the ledger's database. Methods block.

A job ends once: an end is written where there is none, with the answer and the callback that is due, in one
transaction.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, bindparam, case, delete, func, insert, select, tuple_, update

from inferry.domain.async_jobs import (
    AsyncJob,
    AsyncJobDetail,
    CallbackStatus,
    CreatedJobs,
    Delivery,
    JobEnd,
    JobToCreate,
    JobTry,
)
from inferry.domain.errors import Conflict, GatewayError, QueueFull, StorageQuotaExceeded
from inferry.domain.storage import Database, Page, try_id
from inferry.ledger.storage_schema import async_jobs, deliveries
from inferry.ledger.stores.charges import charged_jobs
from inferry.ledger.stores.files import used_bytes
from inferry.ledger.stores.listing import page_rows

RETRY_AFTER_S = 10.0
"""For a tenant with its maximum of unfinished jobs: the database does not know when one will end."""

_c = async_jobs.c
_COLUMNS = [_c[name] for name in AsyncJob.__struct_fields__]
_IS_UNFINISHED = _c.status == "in_progress"
_detail_decoder = msgspec.json.Decoder(AsyncJobDetail)

_IS_OPEN = (_c.id == bindparam("job")) & _IS_UNFINISHED
_HAS_CALLBACK = _c.callback.is_not(None)
_SET_TRIES = update(async_jobs).where(_IS_OPEN).values(tries=bindparam("tries"))
# One statement: of two gateways that end a job, one finds it unfinished.
_SET_END = (
    update(async_jobs)
    .where(_IS_OPEN)
    .values(
        status=bindparam("status"),
        ended_at=bindparam("at", type_=_c.ended_at.type),
        expires_at=bindparam("expires_at"),
        answer_status=bindparam("answer_status"),
        answer=bindparam("answer"),
        request_id=bindparam("request_id"),
        size=_c.size + bindparam("answer_size"),
        callback=case((_HAS_CALLBACK, "pending")),
        callback_at=case((_HAS_CALLBACK, bindparam("at", type_=_c.callback_at.type))),
    )
)


class AsyncJobStore:
    """Operations of clients name the tenant; those of the runner name the job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- for clients -------------------------------------------------------------------------------------------------

    def create(self, job: AsyncJob, body: bytes, quota_bytes: int | None, max_unfinished: int | None) -> AsyncJob:
        """Store a job, or return the one that was created with its idempotency key.

        Raises StorageQuotaExceeded, QueueFull, and Conflict where the key belongs to another request.
        """
        (found,) = self.create_many([JobToCreate(job, body, quota_bytes, max_unfinished)]).jobs
        if isinstance(found, GatewayError):
            raise found
        return found

    def create_many(self, jobs: Sequence[JobToCreate]) -> CreatedJobs:
        """Store jobs in one transaction, each as `create` does. Where that raises, its error is in the result."""
        with self._database.writing() as connection:
            creation = _Creation(connection)
            found = [creation.add(one) for one in jobs]
            if creation.rows:
                connection.execute(insert(async_jobs), creation.rows)
            return CreatedJobs(found, creation.left_bytes, creation.left_jobs)

    def get(self, tenant: str, id: str, now: float) -> AsyncJob | None:
        with self._database.reading() as connection:
            return _find(connection, (_c.tenant == tenant) & (_c.id == id) & _is_visible(now))

    def page(
        self, tenant: str, now: float, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> Page[AsyncJob]:
        query = select(*_COLUMNS).where(_is_visible(now))
        with self._database.reading() as connection:
            rows, has_more = page_rows(
                connection, async_jobs, query, _c.tenant == tenant, after=after, limit=limit, newest_first=newest_first
            )
        return Page([_job(row) for row in rows], has_more)

    def answer(self, id: str) -> bytes | None:
        with self._database.reading() as connection:
            found: bytes | None = connection.execute(select(_c.answer).where(_c.id == id)).scalar()
            return found

    def deliveries(self, id: str) -> list[Delivery]:
        query = select(*(deliveries.c[name] for name in Delivery.__struct_fields__))
        query = query.where(deliveries.c.job_id == id).order_by(deliveries.c.number)
        with self._database.reading() as connection:
            return [Delivery(**row) for row in connection.execute(query).mappings()]

    def delete(self, tenant: str, id: str) -> bool:
        """Whether there was such a job."""
        with self._database.writing() as connection:
            return bool(_delete(connection, (_c.tenant == tenant) & (_c.id == id)))

    def delete_tenant(self, tenant: str) -> list[str]:
        """Delete all jobs of a tenant; return their ids."""
        with self._database.writing() as connection:
            return _delete(connection, _c.tenant == tenant)

    # -- for the runner ----------------------------------------------------------------------------------------------

    def unfinished(self) -> list[AsyncJob]:
        """Jobs that have not ended, the oldest first."""
        with self._database.reading() as connection:
            query = select(*_COLUMNS).where(_IS_UNFINISHED).order_by(_c.created_at)
            return [_job(row) for row in connection.execute(query).mappings()]

    def load(self, id: str) -> tuple[AsyncJob, bytes, bool] | None:
        """A job that has not ended, its body, and whether the ledger has charged its current try."""
        with self._database.reading() as connection:
            query = select(*_COLUMNS, _c.body).where(_c.id == id, _IS_UNFINISHED)
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            is_charged = bool(charged_jobs(connection, [try_id(id, row["tries"])]))
            return _job(row), row["body"], is_charged

    def load_many(self, ids: Sequence[str]) -> list[tuple[AsyncJob, bytes, bool]]:
        """Those of the jobs that have not ended, as `load` returns them."""
        with self._database.reading() as connection:
            # Without the status: SQLite would search by it, through all unfinished jobs of a large table.
            query = select(*_COLUMNS, _c.body).where(_c.id.in_(ids))
            rows = [row for row in connection.execute(query).mappings() if row["status"] == "in_progress"]
            charged = charged_jobs(connection, [try_id(row["id"], row["tries"]) for row in rows])
            return [(_job(row), row["body"], try_id(row["id"], row["tries"]) in charged) for row in rows]

    def unfinished_page(self, after: tuple[str, str], limit: int) -> list[AsyncJob]:
        """The next jobs that have not ended, by tenant and id."""
        query = select(*_COLUMNS).where(_IS_UNFINISHED, tuple_(_c.tenant, _c.id) > tuple_(*after))
        query = query.order_by(_c.tenant, _c.id).limit(limit)
        with self._database.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def open_ids(self, ids: Sequence[str]) -> frozenset[str]:
        """Those of the jobs that have not ended."""
        with self._database.reading() as connection:
            rows = connection.execute(select(_c.id, _c.status).where(_c.id.in_(ids)))  # as in `load_many`
            return frozenset(id for id, status in rows if status == "in_progress")

    def record(self, records: Sequence[JobEnd | JobTry]) -> None:
        """Write ends and tries in one transaction. A job that has ended stays as it is."""
        with self._database.writing() as connection:
            tries = [{"job": one.id, "tries": one.tries} for one in records if isinstance(one, JobTry)]
            if tries:
                connection.execute(_SET_TRIES, tries)
            ends = [_end_values(one) for one in records if isinstance(one, JobEnd)]
            if ends:
                connection.execute(_SET_END, ends)

    def end(self, end: JobEnd) -> bool:
        """End a job; whether it had not ended before."""
        with self._database.writing() as connection:
            return bool(connection.execute(_SET_END, _end_values(end)).rowcount)

    # -- for callbacks -----------------------------------------------------------------------------------------------

    def due_callbacks(self, now: float, others: Collection[str], per_tenant: int, limit: int) -> list[AsyncJob]:
        """Jobs whose callback is due, except `others`: the longest due first, up to `per_tenant` of each tenant."""
        is_due = (_c.callback == "pending") & (_c.callback_at <= now) & _c.id.not_in(others)
        rank = func.row_number().over(partition_by=_c.tenant, order_by=_c.callback_at).label("rank")
        ranked = select(_c.id, rank).where(is_due).subquery()
        ids = select(ranked.c.id).where(ranked.c.rank <= per_tenant)
        query = select(*_COLUMNS).where(_c.id.in_(ids)).order_by(_c.callback_at).limit(limit)
        with self._database.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def next_callback_at(self, after: float) -> float | None:
        """When the next callback is due that is not due yet."""
        query = select(func.min(_c.callback_at)).where(_c.callback == "pending", _c.callback_at > after)
        with self._database.reading() as connection:
            found: float | None = connection.execute(query).scalar()
            return found

    def record_delivery(self, id: str, one: Delivery, callback: CallbackStatus, at: float) -> None:
        """Write an attempt, and the state of the callback after it."""
        with self._database.writing() as connection:
            values = {"callback": callback, "callback_at": at, "callback_attempts": one.number}
            is_pending = (_c.id == id) & (_c.callback == "pending")
            if connection.execute(update(async_jobs).where(is_pending).values(**values)).rowcount:
                connection.execute(insert(deliveries).values(job_id=id, **msgspec.structs.asdict(one)))

    def sweep(self, now: float, limit: int) -> int:
        """Delete up to `limit` expired jobs; return their number."""
        with self._database.writing() as connection:
            ids = select(_c.id).where(_c.expires_at <= now).limit(limit)
            return len(_delete(connection, _c.id.in_([id for (id,) in connection.execute(ids)])))


def _delete(connection: Connection, is_wanted: ColumnElement[bool]) -> list[str]:
    wanted = select(_c.id).where(is_wanted)
    connection.execute(delete(deliveries).where(deliveries.c.job_id.in_(wanted)))
    ids = [id for (id,) in connection.execute(wanted)]
    connection.execute(delete(async_jobs).where(is_wanted))
    return ids


class _Creation:
    """One transaction that creates jobs: `rows` are to be inserted. A tenant's use is read once, if a limit is given.

    `left_bytes`, `left_jobs`: what tenants may still store behind the rows, where their use was read.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._by_key: dict[tuple[str, str], AsyncJob] = {}
        self._bytes: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.left_bytes: dict[str, int] = {}
        self.left_jobs: dict[str, int] = {}

    def add(self, new: JobToCreate) -> AsyncJob | GatewayError:
        """The job, the one that has its idempotency key, or the refusal."""
        job = new.job
        if job.idempotency_key is not None:
            key = job.tenant, job.idempotency_key
            is_same = (_c.tenant == job.tenant) & (_c.idempotency_key == job.idempotency_key)
            found = self._by_key.get(key) or _find(self._connection, is_same)
            if found is not None and found.request_hash != job.request_hash:
                return Conflict("the idempotency key was used for another request", param="idempotency-key")
            if found is not None:
                return found
        if (error := self._refusal(new)) is not None:
            return error
        if job.idempotency_key is not None:
            self._by_key[key] = job
        values = {name: getattr(job, name) for name in AsyncJob.__struct_fields__}
        self.rows.append({**values, "detail": msgspec.json.encode(job.detail), "body": new.body})
        for added, left, amount in ((self._bytes, self.left_bytes, job.size), (self._jobs, self.left_jobs, 1)):
            added[job.tenant] += amount
            if job.tenant in left:
                left[job.tenant] -= amount
        return job

    def _refusal(self, new: JobToCreate) -> GatewayError | None:
        tenant, quota_bytes, most = new.job.tenant, new.quota_bytes, new.max_unfinished
        if quota_bytes is not None:
            if tenant not in self.left_bytes:
                self.left_bytes[tenant] = quota_bytes - used_bytes(self._connection, tenant) - self._bytes[tenant]
            if new.job.size > self.left_bytes[tenant]:
                return StorageQuotaExceeded(f"the tenant may store {quota_bytes} bytes; delete what it does not need")
        if most is not None:
            if tenant not in self.left_jobs:
                query = select(func.count()).select_from(async_jobs).where(_IS_UNFINISHED, _c.tenant == tenant)
                self.left_jobs[tenant] = most - self._connection.execute(query).scalar_one() - self._jobs[tenant]
            if self.left_jobs[tenant] <= 0:
                message = f"the tenant has {most} unfinished jobs, which is its maximum"
                return QueueFull(message, retry_after_s=RETRY_AFTER_S)
        return None


def _end_values(end: JobEnd) -> dict[str, Any]:
    return {
        "job": end.id,
        "status": end.status,
        "at": end.at,
        "expires_at": end.expires_at,
        "answer_status": end.answer_status,
        "answer": end.answer,
        "request_id": end.request_id,
        "answer_size": len(end.answer or b""),
    }


def _find(connection: Connection, is_wanted: ColumnElement[bool]) -> AsyncJob | None:
    row = connection.execute(select(*_COLUMNS).where(is_wanted)).mappings().first()
    return None if row is None else _job(row)


def _job(row: Any) -> AsyncJob:
    values = {name: row[name] for name in AsyncJob.__struct_fields__}
    return AsyncJob(**{**values, "detail": _detail_decoder.decode(values["detail"])})


def _is_visible(now: float) -> ColumnElement[bool]:
    return _c.expires_at.is_(None) | (_c.expires_at > now)
