"""Files of tenants, read and written in chunks: no content is ever in memory as a whole."""

from collections.abc import AsyncIterator
from typing import Protocol

from msgspec.structs import replace

from inferry.domain.clock import Clock
from inferry.domain.errors import BodyTooLarge, StorageDisabled
from inferry.domain.storage import Page, StorageLimits, StoredFile
from inferry.durable.executor import StoreExecutor
from inferry.durable.ids import new_id

CHUNK_BYTES = 256 * 1024


class FileStore(Protocol):
    """Where files are kept. Its methods block."""

    def begin(self, file: StoredFile) -> None: ...
    def append(self, file: StoredFile, number: int, data: bytes, quota_bytes: int | None) -> None: ...
    def finish(self, file: StoredFile) -> StoredFile: ...
    def get(self, tenant: str, id: str, now: float) -> StoredFile | None: ...
    def list(
        self,
        tenant: str,
        now: float,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 10_000,
        newest_first: bool = True,
    ) -> Page[StoredFile]: ...
    def chunk(self, id: str, number: int) -> bytes | None: ...
    def delete(self, tenant: str, id: str) -> bool: ...


class Upload:
    """A file being written. It becomes visible with `finish`; the sweeper deletes what is never finished."""

    def __init__(
        self,
        store: FileStore,
        executor: StoreExecutor,
        file: StoredFile,
        *,
        max_bytes: int | None = None,
        quota_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._executor = executor
        self._file = file
        self._max_bytes = max_bytes
        self._quota_bytes = quota_bytes
        self._buffer = bytearray()
        self._size = 0
        self._chunks = 0

    async def write(self, data: bytes) -> None:
        """Append to the content. Raises BodyTooLarge, StorageQuotaExceeded."""
        self._size += len(data)
        if self._max_bytes is not None and self._size > self._max_bytes:
            raise BodyTooLarge(f"the file exceeds {self._max_bytes} bytes")
        self._buffer += data
        while len(self._buffer) >= CHUNK_BYTES:
            await self._append(bytes(self._buffer[:CHUNK_BYTES]))

    async def finish(self, *, purpose: str, filename: str, ttl_s: float | None) -> StoredFile:
        """Make the file visible. `ttl_s` None: until it is deleted."""
        file = await self.complete(purpose=purpose, filename=filename, ttl_s=ttl_s)
        return await self._executor.run(self._store.finish, file)

    async def complete(self, *, purpose: str, filename: str, ttl_s: float | None) -> StoredFile:
        """Write the rest of the content; return the file as it is to be when it becomes visible."""
        if self._buffer:
            await self._append(bytes(self._buffer))
        expires_at = None if ttl_s is None else self._file.created_at + ttl_s
        return replace(self._file, purpose=purpose, filename=filename, expires_at=expires_at)

    async def discard(self) -> None:
        await self._executor.run(self._store.delete, self._file.tenant, self._file.id)

    async def _append(self, chunk: bytes) -> None:
        del self._buffer[: len(chunk)]
        await self._executor.run(self._store.append, self._file, self._chunks, chunk, self._quota_bytes)
        self._chunks += 1


class Files:
    """The files of all tenants. Belongs to one event loop."""

    def __init__(self, store: FileStore, executor: StoreExecutor, limits: StorageLimits, clock: Clock) -> None:
        self.limits = limits
        self._store = store
        self._executor = executor
        self._clock = clock

    def require_enabled(self) -> None:
        """Raises StorageDisabled where nothing is stored."""
        if self.limits.store == "never":
            raise StorageDisabled("this gateway stores no content: files and batches are disabled")

    async def begin_upload(self, tenant: str) -> Upload:
        """A file that a client sends, within its limits."""
        self.require_enabled()
        limits = self.limits
        file = await self._begin(tenant)
        return Upload(
            self._store,
            self._executor,
            file,
            max_bytes=limits.max_file_bytes,
            quota_bytes=limits.max_bytes_per_tenant,
        )

    async def begin_output(self, tenant: str) -> Upload:
        """A file that the gateway writes. It has no limit: the work is done and paid for."""
        return Upload(self._store, self._executor, await self._begin(tenant))

    async def _begin(self, tenant: str) -> StoredFile:
        file = StoredFile(
            id=new_id("file-"),
            tenant=tenant,
            status="uploading",
            purpose="",
            filename="",
            size=0,
            created_at=self._clock.wall(),
        )
        await self._executor.run(self._store.begin, file)
        return file

    async def get(self, tenant: str, id: str) -> StoredFile | None:
        return await self._executor.run(self._store.get, tenant, id, self._clock.wall())

    async def list(
        self,
        tenant: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 10_000,
        newest_first: bool = True,
    ) -> Page[StoredFile]:
        now = self._clock.wall()
        return await self._executor.run(
            self._store.list, tenant, now, purpose=purpose, after=after, limit=limit, newest_first=newest_first
        )

    async def delete(self, tenant: str, id: str) -> bool:
        """Whether there was such a file."""
        return await self._executor.run(self._store.delete, tenant, id)

    async def chunks(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The content, chunk by chunk. Raises ConnectionAbortedError where the file is deleted meanwhile."""
        number = size = 0
        while size < file.size:
            chunk = await self._executor.run(self._store.chunk, file.id, number)
            if chunk is None:
                raise ConnectionAbortedError("the file was deleted while it was read")
            yield chunk
            number, size = number + 1, size + len(chunk)
