"""Documents of tenants, in the ledger's database. Methods block."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, delete, insert, select, update

from inferry.domain.errors import Conflict, StorageQuotaExceeded
from inferry.domain.storage import Database, Document, Page
from inferry.ledger.storage_schema import documents
from inferry.ledger.stores.charges import charged_jobs
from inferry.ledger.stores.files import used_bytes
from inferry.ledger.stores.listing import page_rows

_COLUMNS = [documents.c[name] for name in Document.__struct_fields__]


class DocumentStore:
    """Every operation names the tenant. A document that has expired is not found."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, document: Document, *, replace: bool = True, quota_bytes: int | None = None) -> int | None:
        """Store the document. Returns the bytes that are left of the tenant's quota; None without one.

        Raises Conflict where the document exists and is not to be replaced, and StorageQuotaExceeded.
        """
        same = _is(document.tenant, document.kind, document.id)
        with self._database.writing() as connection:
            left = None
            if quota_bytes is not None:
                left = quota_bytes - used_bytes(connection, document.tenant) - len(document.content)
                if left < 0:
                    raise StorageQuotaExceeded(
                        f"the tenant may store {quota_bytes} bytes; delete what it does not need"
                    )
            if replace:
                connection.execute(delete(documents).where(same))
            elif connection.execute(select(documents.c.id).where(same)).first() is not None:
                raise Conflict("a document with this id exists")
            row = {name: getattr(document, name) for name in Document.__struct_fields__}
            connection.execute(insert(documents).values(size=len(document.content), **row))
        return left

    def swap(self, document: Document, content: bytes) -> bool:
        """Replace the document if its content is still this one; whether it was."""
        row = {name: getattr(document, name) for name in Document.__struct_fields__}
        is_unchanged = _is(document.tenant, document.kind, document.id) & (documents.c.content == content)
        query = update(documents).where(is_unchanged).values(size=len(document.content), **row)
        with self._database.writing() as connection:
            return bool(connection.execute(query).rowcount)

    def get(self, tenant: str, kind: str, id: str, now: float) -> Document | None:
        query = select(*_COLUMNS).where(_is(tenant, kind, id), _is_live(now))
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else Document(**row)

    def list(
        self,
        tenant: str,
        kind: str,
        now: float,
        *,
        after: str | None = None,
        limit: int = 20,
        newest_first: bool = True,
    ) -> Page[Document]:
        """Documents by creation, beginning behind the one with the id `after`."""
        scope = (documents.c.tenant == tenant) & (documents.c.kind == kind)
        query = select(*_COLUMNS).where(_is_live(now))
        with self._database.reading() as connection:
            rows, has_more = page_rows(
                connection, documents, query, scope, after=after, limit=limit, newest_first=newest_first
            )
        return Page([Document(**row) for row in rows], has_more)

    def charged_jobs(self, job_ids: Sequence[str]) -> frozenset[str]:
        """Those of the jobs that the ledger has charged."""
        with self._database.reading() as connection:
            return charged_jobs(connection, job_ids)

    def of_kind(self, kind: str, now: float) -> Sequence[Document]:
        """The documents of all tenants, the oldest first."""
        c = documents.c
        query = select(*_COLUMNS).where(c.kind == kind, _is_live(now)).order_by(c.created_at, c.id)
        with self._database.reading() as connection:
            return [Document(**row) for row in connection.execute(query).mappings()]

    def ids_of_kind(self, kind: str) -> frozenset[tuple[str, str]]:
        """Tenant and id of the documents of all tenants, without their content."""
        query = select(documents.c.tenant, documents.c.id).where(documents.c.kind == kind)
        with self._database.reading() as connection:
            return frozenset((tenant, id) for tenant, id in connection.execute(query))

    def delete(self, tenant: str, kind: str, id: str) -> bool:
        """Whether there was such a document."""
        with self._database.writing() as connection:
            return bool(connection.execute(delete(documents).where(_is(tenant, kind, id))).rowcount)

    def delete_tenant(self, tenant: str) -> int:
        """Delete all documents of the tenant; return their number."""
        with self._database.writing() as connection:
            return int(connection.execute(delete(documents).where(documents.c.tenant == tenant)).rowcount)

    def sweep(self, now: float, limit: int) -> int:
        """Delete up to `limit` expired documents; return their number."""
        c = documents.c
        expired = select(c.tenant, c.kind, c.id).where(c.expires_at <= now).limit(limit)
        with self._database.writing() as connection:
            found = connection.execute(expired).all()
            for row in found:
                connection.execute(delete(documents).where(_is(*row)))
        return len(found)


def _is(tenant: str, kind: str, id: str) -> ColumnElement[bool]:
    c = documents.c
    return (c.tenant == tenant) & (c.kind == kind) & (c.id == id)


def _is_live(now: float) -> ColumnElement[bool]:
    return documents.c.expires_at.is_(None) | (documents.c.expires_at > now)
