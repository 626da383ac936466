"""Batches of tenants and their items, in the ledger's database. Methods block.

An item has its outcome once and for all: results are written where there is none. The result, the outcome and the
counts of the batch are one transaction.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select, update

from inferry.domain.errors import StorageQuotaExceeded
from inferry.domain.storage import (
    UNFINISHED,
    Batch,
    BatchApi,
    BatchDetail,
    BatchItem,
    BatchStatus,
    Database,
    ItemOutcome,
    ItemResult,
    ItemTry,
    Outcome,
    Page,
    StoredFile,
    item_id,
    try_id,
)
from inferry.ledger.storage_schema import batch_items, batches, provider_batches
from inferry.ledger.stores.charges import charged_jobs
from inferry.ledger.stores.files import finish_file, used_bytes
from inferry.ledger.stores.listing import page_rows

_COLUMNS = [batches.c[name] for name in Batch.__struct_fields__]
_detail_decoder = msgspec.json.Decoder(BatchDetail)

_IS_OPEN = (
    (batch_items.c.batch_id == bindparam("in_batch"))
    & (batch_items.c.number == bindparam("at"))
    & batch_items.c.outcome.is_(None)
)
_SET_TRIES = update(batch_items).where(_IS_OPEN).values(tries=bindparam("tries"))
_SET_OUTCOME = update(batch_items).where(_IS_OPEN).values(outcome=bindparam("outcome"), result=bindparam("result"))


class BatchStore:
    """Operations of clients name the tenant; those of the runner name the batch."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- for clients -------------------------------------------------------------------------------------------------

    def create(self, batch: Batch, items: Sequence[BatchItem], quota_bytes: int | None) -> None:
        """Store a batch with the items that are known already. Raises StorageQuotaExceeded."""
        with self._database.writing() as connection:
            if quota_bytes is not None and used_bytes(connection, batch.tenant) + batch.size > quota_bytes:
                raise StorageQuotaExceeded(f"the tenant may store {quota_bytes} bytes; delete what it does not need")
            values = {name: getattr(batch, name) for name in Batch.__struct_fields__}
            connection.execute(insert(batches).values(**{**values, "detail": msgspec.json.encode(batch.detail)}))
            _insert_items(connection, batch.id, items)

    def get(self, tenant: str, api: BatchApi, id: str, now: float) -> Batch | None:
        is_wanted = (batches.c.tenant == tenant) & (batches.c.api == api) & (batches.c.id == id) & _is_visible(now)
        with self._database.reading() as connection:
            return _find(connection, is_wanted)

    def page(
        self,
        tenant: str,
        api: BatchApi,
        now: float,
        *,
        after: str | None = None,
        limit: int = 20,
        newest_first: bool = True,
    ) -> Page[Batch]:
        scope = (batches.c.tenant == tenant) & (batches.c.api == api)
        query = select(*_COLUMNS).where(_is_visible(now))
        with self._database.reading() as connection:
            rows, has_more = page_rows(
                connection, batches, query, scope, after=after, limit=limit, newest_first=newest_first
            )
        return Page([_batch(row) for row in rows], has_more)

    def outcome_counts(self, id: str) -> dict[Outcome, int]:
        c = batch_items.c
        query = select(c.outcome, func.count()).where(c.batch_id == id, c.outcome.is_not(None)).group_by(c.outcome)
        with self._database.reading() as connection:
            return dict(connection.execute(query).all())

    def delete_tenant(self, tenant: str) -> tuple[int, list[str]]:
        """Delete all batches of a tenant; return their number, and the ids of those that are not finished."""
        is_wanted = (batches.c.tenant == tenant) & (batches.c.status != "deleted")
        with self._database.writing() as connection:
            unfinished = select(batches.c.id).where(is_wanted, batches.c.status.in_(UNFINISHED))
            ids = [id for (id,) in connection.execute(unfinished)]
            return connection.execute(update(batches).where(is_wanted).values(status="deleted")).rowcount, ids

    # -- for the runner ----------------------------------------------------------------------------------------------

    def load(self, id: str) -> Batch | None:
        with self._database.reading() as connection:
            return _find(connection, (batches.c.id == id) & (batches.c.status != "deleted"))

    def unfinished(self) -> list[str]:
        """Batches that are not finished, the oldest first."""
        query = select(batches.c.id).where(batches.c.status.in_(UNFINISHED)).order_by(batches.c.created_at)
        with self._database.reading() as connection:
            return [id for (id,) in connection.execute(query)]

    def move(self, id: str, current: Sequence[BatchStatus], status: BatchStatus, now: float, **changes: Any) -> bool:
        """Change the status from one of `current`, and with it `errors` or `final`; whether it had such a status."""
        with self._database.writing() as connection:
            batch = _find(connection, (batches.c.id == id) & batches.c.status.in_(current))
            if batch is None:
                return False
            _set_status(connection, batch, status, now, **changes)
        return True

    def clear_items(self, id: str) -> None:
        """Forget the items of a validation that was interrupted."""
        with self._database.writing() as connection:
            connection.execute(delete(batch_items).where(batch_items.c.batch_id == id))
            connection.execute(update(batches).where(batches.c.id == id).values(size=0, total=0))

    def add_items(self, id: str, items: Sequence[BatchItem]) -> list[BatchItem]:
        """Store items; return those whose custom id is taken."""
        c = batch_items.c
        names = [item.custom_id for item in items]
        with self._database.writing() as connection:
            query = select(c.custom_id).where(c.batch_id == id, c.custom_id.in_(names))
            seen = {name for (name,) in connection.execute(query)}
            repeated: list[BatchItem] = []
            fresh: list[BatchItem] = []
            for item in items:
                (repeated if item.custom_id in seen else fresh).append(item)
                seen.add(item.custom_id)
            _insert_items(connection, id, fresh)
            size = sum(len(item.body) for item in fresh)
            added = {"size": batches.c.size + size, "total": batches.c.total + len(fresh)}
            connection.execute(update(batches).where(batches.c.id == id).values(**added))
        return repeated

    def pending(self, id: str, after: int, limit: int, max_bytes: int) -> list[BatchItem]:
        """The next items without an outcome that no provider executes, at least one, up to `limit` and `max_bytes`."""
        c = batch_items.c
        is_own = c.provider_batch.is_(None) | (c.provider_batch == "")
        is_next = (c.batch_id == id) & c.outcome.is_(None) & is_own & (c.number > after)
        with self._database.reading() as connection:
            last = _last_within(connection, is_next, c.body, limit, max_bytes)
            query = select(c.number, c.custom_id, c.body, c.tries).where(is_next, c.number <= last).order_by(c.number)
            found = [BatchItem(*row) for row in connection.execute(query)]
            names = {item.number: try_id(item_id(id, item.number), item.tries) for item in found}
            charged = charged_jobs(connection, names.values())
        return [replace(item, is_charged=names[item.number] in charged) for item in found]

    def load_items(self, wanted: Sequence[tuple[str, int]]) -> list[tuple[Batch, BatchItem]]:
        """Items without an outcome, of batches in progress, by batch and number."""
        c = batch_items.c
        found: list[tuple[Batch, BatchItem]] = []
        with self._database.reading() as connection:
            for id, numbers in _by_batch(wanted).items():
                batch = _find(connection, (batches.c.id == id) & (batches.c.status == "in_progress"))
                if batch is not None:
                    is_open = (c.batch_id == id) & c.number.in_(numbers) & c.outcome.is_(None)
                    rows = connection.execute(select(c.number, c.custom_id, c.body, c.tries).where(is_open))
                    found += [(batch, BatchItem(*row)) for row in rows]
            names = [try_id(item_id(batch.id, item.number), item.tries) for batch, item in found]
            charged = charged_jobs(connection, names)
        return [
            (batch, replace(item, is_charged=name in charged)) for (batch, item), name in zip(found, names, strict=True)
        ]

    def open_items(self, wanted: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """Those of the items that have no outcome, of batches in progress."""
        c, b = batch_items.c, batches.c
        found: set[tuple[str, int]] = set()
        with self._database.reading() as connection:
            for id, numbers in _by_batch(wanted).items():
                is_open = (c.batch_id == id) & c.number.in_(numbers) & c.outcome.is_(None)
                is_running = select(b.id).where(b.id == id, b.status == "in_progress").exists()
                found |= {(id, number) for (number,) in connection.execute(select(c.number).where(is_open, is_running))}
        return frozenset(found)

    def record(self, records: Sequence[ItemResult | ItemTry]) -> None:
        """Write results and tries in one transaction. An item that has an outcome keeps it."""
        results: dict[tuple[str, Outcome], list[ItemResult]] = defaultdict(list)
        for one in records:
            if isinstance(one, ItemResult):
                results[one.batch_id, one.outcome].append(one)
        tries = [one for one in records if isinstance(one, ItemTry)]
        b = batches.c
        with self._database.writing() as connection:
            if tries:
                rows = [{"in_batch": one.batch_id, "at": one.number, "tries": one.tries} for one in tries]
                connection.execute(_SET_TRIES, rows)
            for (id, outcome), group in results.items():
                rows = [{"in_batch": id, "at": one.number, "outcome": outcome, "result": one.line} for one in group]
                count = connection.execute(_SET_OUTCOME, rows).rowcount
                counted = b.completed if outcome == "succeeded" else b.failed
                added = {counted.name: counted + count, "size": b.size + sum(len(one.line) for one in group)}
                connection.execute(update(batches).where(b.id == id).values(**added))

    def end_pending(self, id: str, outcome: Outcome) -> int:
        """Give every item without an outcome this one; return how many."""
        c = batch_items.c
        with self._database.writing() as connection:
            is_open = (c.batch_id == id) & c.outcome.is_(None)
            ended = int(connection.execute(update(batch_items).where(is_open).values(outcome=outcome)).rowcount)
            connection.execute(update(batches).where(batches.c.id == id).values(failed=batches.c.failed + ended))
        return ended

    def outcomes(self, id: str, after: int, max_bytes: int) -> list[ItemOutcome]:
        """The next items in their order, at least one, up to `max_bytes` of results."""
        c = batch_items.c
        is_next = (c.batch_id == id) & c.outcome.is_not(None) & (c.number > after)
        with self._database.reading() as connection:
            last = _last_within(connection, is_next, c.result, 1000, max_bytes)
            query = select(c.number, c.custom_id, c.outcome, c.result).where(is_next, c.number <= last)
            return [ItemOutcome(*row) for row in connection.execute(query.order_by(c.number))]

    def finish(self, id: str, now: float, output: StoredFile | None, errors: StoredFile | None) -> None:
        """End a batch and make its files visible, in one transaction."""
        with self._database.writing() as connection:
            batch = _find(connection, (batches.c.id == id) & batches.c.status.in_(UNFINISHED))
            if batch is None:
                return
            for column, file in (("output_file", output), ("error_file", errors)):
                if file is not None:
                    finish_file(connection, file)
                    connection.execute(update(batches).where(batches.c.id == id).values(**{column: file.id}))
            _set_status(connection, batch, batch.detail.final, now)

    def sweep(self, now: float, limit: int) -> int:
        """Delete up to `limit` items that are of no use: of deleted and expired batches, and of those with files."""
        b, c = batches.c, batch_items.c
        is_over = (b.status == "deleted") | (b.expires_at <= now)
        is_in_files = (b.api == "openai") & (b.size > 0) & b.status.in_(("completed", "failed", "expired", "cancelled"))
        with self._database.writing() as connection:
            found = connection.execute(select(b.id, is_over).where(is_over | is_in_files).limit(1)).first()
            if found is None:
                return 0
            id, is_deleted = found
            numbers = select(c.number).where(c.batch_id == id).limit(limit)
            swept = connection.execute(delete(batch_items).where(c.batch_id == id, c.number.in_(numbers))).rowcount
            if swept < limit and is_deleted:
                connection.execute(delete(provider_batches).where(provider_batches.c.batch_id == id))
                connection.execute(delete(batches).where(b.id == id))
            elif swept < limit:
                connection.execute(update(batches).where(b.id == id).values(size=0))
        return limit  # there may be another batch


def _last_within(
    connection: Connection, is_next: ColumnElement[bool], content: ColumnElement[bytes], limit: int, max_bytes: int
) -> int:
    """The number of the last item up to `limit` items and `max_bytes`, the first one included; 0 without items.

    Lengths are read before contents, so that no database sends more than is wanted.
    """
    c = batch_items.c
    last, size = 0, 0
    lengths = select(c.number, func.coalesce(func.length(content), 0)).where(is_next).order_by(c.number).limit(limit)
    for number, length in connection.execute(lengths):
        last, size = number, size + length
        if size >= max_bytes:
            break
    return last


def _by_batch(items: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for id, number in items:
        found[id].append(number)
    return found


def _insert_items(connection: Connection, id: str, items: Sequence[BatchItem]) -> None:
    if items:
        rows = [
            {"batch_id": id, "number": one.number, "custom_id": one.custom_id, "body": one.body, "tries": one.tries}
            for one in items
        ]
        connection.execute(insert(batch_items), rows)


def _set_status(connection: Connection, batch: Batch, status: BatchStatus, now: float, **changes: Any) -> None:
    times = {**batch.detail.times, status: now}
    detail = msgspec.structs.replace(batch.detail, times=times, **changes)
    values: dict[str, Any] = {"status": status, "detail": msgspec.json.encode(detail)}
    if status not in UNFINISHED and detail.output_ttl_s is not None:
        values["expires_at"] = now + detail.output_ttl_s  # a batch is shown as long as its results
    connection.execute(update(batches).where(batches.c.id == batch.id).values(**values))


def _find(connection: Connection, is_wanted: ColumnElement[bool]) -> Batch | None:
    row = connection.execute(select(*_COLUMNS).where(is_wanted)).mappings().first()
    return None if row is None else _batch(row)


def _batch(row: Any) -> Batch:
    return Batch(**{**row, "detail": _detail_decoder.decode(row["detail"])})


def _is_visible(now: float) -> ColumnElement[bool]:
    return (batches.c.status != "deleted") & (batches.c.expires_at.is_(None) | (batches.c.expires_at > now))
