"""Files of tenants, in the ledger's database: a row, and the content in chunks. Methods block.

A file is written as `uploading` and becomes visible when it is finished. A deleted file is invisible at once; the
sweeper deletes its chunks in slices, so that no transaction is long.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from inferry.domain.errors import NotFound, StorageQuotaExceeded
from inferry.domain.storage import Database, Page, StoredFile
from inferry.ledger.storage_schema import async_jobs, batches, documents, file_chunks, files
from inferry.ledger.stores.listing import page_rows

ABANDONED_S = 86_400.0
"""An upload that is not finished after this time is deleted. A restart of the only gateway deletes all of
them."""
_COLUMNS = [files.c[name] for name in StoredFile.__struct_fields__]


class FileStore:
    """Every operation of a client names the tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, file: StoredFile) -> None:
        with self._database.writing() as connection:
            insert_file(connection, file)

    def append(self, file: StoredFile, number: int, data: bytes, quota_bytes: int | None) -> None:
        """Write a chunk of a file that was begun. Raises StorageQuotaExceeded, and NotFound where it was deleted."""
        with self._database.writing() as connection:
            if quota_bytes is not None and used_bytes(connection, file.tenant) + len(data) > quota_bytes:
                raise StorageQuotaExceeded(f"the tenant may store {quota_bytes} bytes; delete files it does not need")
            if not append_chunk(connection, file.id, number, data):
                raise NotFound("the file was deleted during its upload")

    def finish(self, file: StoredFile) -> StoredFile:
        """Make the file visible, with the values given except its size. Raises NotFound."""
        with self._database.writing() as connection:
            return finish_file(connection, file)

    def get(self, tenant: str, id: str, now: float) -> StoredFile | None:
        with self._database.reading() as connection:
            return find_file(connection, tenant, id, now)

    def list(
        self,
        tenant: str,
        now: float,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 10_000,
        newest_first: bool = True,
    ) -> Page[StoredFile]:
        query = select(*_COLUMNS).where(_is_visible(now))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        with self._database.reading() as connection:
            rows, has_more = page_rows(
                connection, files, query, files.c.tenant == tenant, after=after, limit=limit, newest_first=newest_first
            )
        return Page([StoredFile(**row) for row in rows], has_more)

    def chunk(self, id: str, number: int) -> bytes | None:
        """A part of the content; None behind its end, and where the file was deleted."""
        c = file_chunks.c
        with self._database.reading() as connection:
            query = select(c.data).join(files, files.c.id == c.file_id)
            is_wanted = (c.file_id == id) & (c.number == number) & (files.c.status != "deleted")
            found: bytes | None = connection.execute(query.where(is_wanted)).scalar()
            return found

    def delete(self, tenant: str, id: str) -> bool:
        """Whether there was such a file."""
        is_wanted = (files.c.tenant == tenant) & (files.c.id == id) & (files.c.status != "deleted")
        with self._database.writing() as connection:
            return bool(connection.execute(update(files).where(is_wanted).values(status="deleted")).rowcount)

    def delete_tenant(self, tenant: str) -> int:
        is_wanted = (files.c.tenant == tenant) & (files.c.status != "deleted")
        with self._database.writing() as connection:
            return int(connection.execute(update(files).where(is_wanted).values(status="deleted")).rowcount)

    def discard_uploads(self) -> int:
        """Delete what a process that has ended did not finish."""
        with self._database.writing() as connection:
            is_unfinished = files.c.status == "uploading"
            return int(connection.execute(update(files).where(is_unfinished).values(status="deleted")).rowcount)

    def used_bytes(self, tenant: str) -> int:
        """All stored bytes of the tenant."""
        with self._database.reading() as connection:
            return used_bytes(connection, tenant)

    def sweep(self, now: float, limit: int) -> int:
        """Delete up to `limit` chunks, and rows without chunks, of files that were deleted, expired or abandoned."""
        is_abandoned = (files.c.status == "uploading") & (files.c.created_at <= now - ABANDONED_S)
        is_over = (files.c.status == "deleted") | (files.c.expires_at <= now) | is_abandoned
        with self._database.writing() as connection:
            id = connection.execute(select(files.c.id).where(is_over).limit(1)).scalar()
            if id is None:
                return 0
            connection.execute(update(files).where(files.c.id == id).values(status="deleted"))
            numbers = select(file_chunks.c.number).where(file_chunks.c.file_id == id).limit(limit)
            is_swept = (file_chunks.c.file_id == id) & file_chunks.c.number.in_(numbers)
            swept = connection.execute(delete(file_chunks).where(is_swept)).rowcount
            if swept < limit:
                connection.execute(delete(files).where(files.c.id == id))
        return limit  # there may be another file


def insert_file(connection: Connection, file: StoredFile) -> None:
    connection.execute(insert(files).values(**{name: getattr(file, name) for name in StoredFile.__struct_fields__}))


def append_chunk(connection: Connection, id: str, number: int, data: bytes) -> bool:
    """Write a chunk; False where the file is no longer being written."""
    is_open = (files.c.id == id) & (files.c.status == "uploading")
    if not connection.execute(update(files).where(is_open).values(size=files.c.size + len(data))).rowcount:
        return False
    connection.execute(insert(file_chunks).values(file_id=id, number=number, data=data))
    return True


def finish_file(connection: Connection, file: StoredFile) -> StoredFile:
    is_open = (files.c.id == file.id) & (files.c.status == "uploading")
    values: dict[str, Any] = {"purpose": file.purpose, "filename": file.filename, "expires_at": file.expires_at}
    if not connection.execute(update(files).where(is_open).values(status="processed", **values)).rowcount:
        raise NotFound("the file was deleted during its upload")
    row = connection.execute(select(*_COLUMNS).where(files.c.id == file.id)).mappings().one()
    return StoredFile(**row)


def find_file(connection: Connection, tenant: str, id: str, now: float) -> StoredFile | None:
    query = select(*_COLUMNS).where(files.c.tenant == tenant, files.c.id == id, _is_visible(now))
    row = connection.execute(query).mappings().first()
    return None if row is None else StoredFile(**row)


def _is_visible(now: float) -> ColumnElement[bool]:
    return (files.c.status == "processed") & (files.c.expires_at.is_(None) | (files.c.expires_at > now))


def used_bytes(connection: Connection, tenant: str) -> int:
    return sum(
        int(
            connection.execute(
                select(func.coalesce(func.sum(table.c.size), 0)).where(table.c.tenant == tenant)
            ).scalar_one()
        )
        for table in (files, documents, batches, async_jobs)
    )
