"""The tables of stored content: documents, files, batches, async jobs. `metadata` has these and the ledger's."""

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, Table, UniqueConstraint

from inferry.ledger.schema import Text, metadata

__all__ = [
    "async_jobs",
    "batch_items",
    "batches",
    "callback_secrets",
    "deliveries",
    "documents",
    "file_chunks",
    "files",
    "metadata",
    "provider_batches",
]

documents = Table(
    "documents",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("size", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Index("documents_by_creation", "tenant", "kind", "created_at", "id"),
    Index("documents_by_expiry", "expires_at"),
    Index("documents_by_kind", "kind", "created_at"),
)

files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Index("files_by_creation", "tenant", "created_at", "id"),
    Index("files_by_expiry", "expires_at"),
    Index("files_by_status", "status", "created_at"),
)

# A file's content in pieces of limited size, so that no content is ever in memory as a whole.
file_chunks = Table(
    "file_chunks",
    metadata,
    Column("file_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text),
    Column("api", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file", Text),
    Column("output_file", Text),
    Column("error_file", Text),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("expires_at", Float),
    Column("detail", LargeBinary, nullable=False),
    Index("batches_by_creation", "tenant", "api", "created_at", "id"),
    Index("batches_by_status", "status"),
    Index("batches_by_expiry", "expires_at"),
)

# `tries` counts failed tries of an item; with the item it identifies a job, so that a try that a killed process did not
# finish is not charged twice. `outcome` is null until the item has its result.
batch_items = Table(
    "batch_items",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("outcome", Text),
    Column("result", LargeBinary),
    Column("provider_batch", Text),
    UniqueConstraint("batch_id", "custom_id"),
    Index("batch_items_by_outcome", "batch_id", "outcome", "number"),
)

# Batches of hosted providers, until their results are stored. `batch_items.provider_batch` names the one that executes
# an item. It is empty for an item that a provider has returned and the gateway executes itself.
provider_batches = Table(
    "provider_batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("batch_id", Text, nullable=False),
    Column("worker", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("items", Integer, nullable=False),
    Column("is_begun", Boolean, nullable=False),
    Column("provider_id", Text),
    Index("provider_batches_by_batch", "batch_id"),
)

# `tries` is as in `batch_items`. The answer, the status and the state of the callback change in one transaction.
async_jobs = Table(
    "async_jobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text),
    Column("endpoint", Text, nullable=False),
    Column("lane", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("detail", LargeBinary, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("ended_at", Float),
    Column("expires_at", Float),
    Column("answer_status", Integer),
    Column("request_id", Text),
    Column("callback", Text),
    Column("callback_at", Float),
    Column("callback_attempts", Integer, nullable=False),
    Column("idempotency_key", Text),
    Column("request_hash", LargeBinary),
    Column("body", LargeBinary, nullable=False),
    Column("answer", LargeBinary),
    UniqueConstraint("tenant", "idempotency_key"),
    Index("async_jobs_by_creation", "tenant", "created_at", "id"),
    Index("async_jobs_by_size", "tenant", "size"),
    Index("async_jobs_by_status", "status", "tenant", "id"),
    Index("async_jobs_by_callback", "callback", "callback_at"),
    Index("async_jobs_by_expiry", "expires_at"),
)

# The delivery log of callbacks. It has no bodies and no addresses.
deliveries = Table(
    "deliveries",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("status", Integer),
    Column("error", Text),
    Column("latency_ms", Integer, nullable=False),
)

# Unlike those of API keys these secrets are stored as they are: the gateway signs with them.
callback_secrets = Table(
    "callback_secrets",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Index("callback_secrets_by_tenant", "tenant"),
)
