"""The tables of the ledger's database: attempts, tenants, keys and budget watermarks. `storage_schema` has the rest."""

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, Table
from sqlalchemy import Text as AnyText

SCHEMA_VERSION = 10

# Ordered by bytes in PostgreSQL too, whatever the database's language.
Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")

metadata = MetaData()

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("tenant", Text, nullable=False),
    Column("run_id", Text, nullable=False),
    Column("step_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("lane", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("ended_at", Float, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("gpu_seconds", Float),
    Column("queue_ms", Float),
    Column("first_token_ms", Float),
    Column("total_ms", Float, nullable=False),
    Column("batch_size", Integer),
    Column("release_reason", Text),
    Column("worker", Text),
    Column("parent_run", Text),
    Column("finish", Text),
    Column("error_code", Text),
    Column("request_id", Text),
    Column("key_id", Text),
    Column("cost_nanos", BigInteger),
    Column("shared_with", Text),
    Column("template_id", Text),
    Column("attained", Boolean),
    Column("batching_ms", Float),
    Column("engine_batch", Float),
    Column("batch_fill", Float),
    Column("gpu_estimated", Boolean),
    Column("decision", Text),
    Column("settings_version", Integer),
    Column("composed", Text),
    Index("attempts_by_run", "tenant", "run_id", "ended_at"),
    Index("attempts_by_end", "ended_at"),
)

# A partial index: few jobs are retried, so it stays small, and finding a later attempt scans no table.
IS_RETRY = attempts.c.attempt > 1
Index("attempts_retried", attempts.c.job_id, attempts.c.attempt, sqlite_where=IS_RETRY, postgresql_where=IS_RETRY)

tenants = Table(
    "tenants",
    metadata,
    Column("name", Text, primary_key=True),
    Column("limits", LargeBinary, nullable=False),
    Column("isolation", Text, nullable=False),
    Column("weight", Float, nullable=False, server_default="1"),
    Column("shadow", Boolean, nullable=False),
    Column("disabled", Boolean, nullable=False),
)

# Rows of revoked keys stay: the ledger refers to them, and a gateway that ever had a key keeps requiring one.
keys = Table(
    "keys",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("label", Text, nullable=False),
    Column("limits", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Index("keys_by_tenant", "tenant"),
)

# Incremented with every change of tenants and keys, so that one row shows whether there was a change.
changes = Table(
    "changes",
    metadata,
    Column("of", Text, primary_key=True),
    Column("version", Integer, nullable=False),
)

# Upper bounds of what budget accounts have used, written before use. Few rows: one per account in use.
watermarks = Table(
    "watermarks",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("period", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("tokens", BigInteger, nullable=False),
    Column("nanos", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
)

# What gateways that share limits hold of budget accounts, written before use. The generation of their authority is in
# `changes`.
holdings = Table(
    "holdings",
    metadata,
    Column("holder", Text, primary_key=True),
    Column("account", Text, primary_key=True),
    Column("amount", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
)

# Wall time of workers, times their GPUs: one row per worker, interval and kind (`work`, `cancelled`, `preempted`,
# `recomputed`, `idle`, `unattributed`). The rows of an interval add up to its length times the number of GPUs.
gpu_time = Table(
    "gpu_time",
    metadata,
    Column("worker", Text, primary_key=True),
    Column("started_at", Float, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("ended_at", Float, nullable=False),
    Column("gpu_seconds", Float, nullable=False),
    Index("gpu_time_by_end", "ended_at"),
)

# Versions of the settings, and the changes that made one of them active or tried it. Neither is ever deleted.
settings_versions = Table(
    "settings_versions",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("created_at", Float, nullable=False),
    Column("content", LargeBinary, nullable=False),
)
settings_changes = Table(
    "settings_changes",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("content", LargeBinary, nullable=False),
)

# How calls of composed models were answered: one row per call. Its steps are rows of `attempts`, with the same name in
# `composed`.
composed_calls = Table(
    "composed_calls",
    metadata,
    Column("call_id", Text, primary_key=True),
    Column("ended_at", Float, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("accepted", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("score", Float),
    Column("agreed", Boolean),
    Index("composed_calls_by_end", "ended_at"),
)

# Sums of attempts whose rows were deleted, by the hour in which they ended (its begin in Unix seconds). An attempt
# counts in `attempts` or in here, never in both. Columns are as in `measures`; `key_id` is empty for calls without a
# key. `runs`: runs of which no row is left.
rollups = Table(
    "rollups",
    metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("lane", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("runs", BigInteger, nullable=False),
    Column("jobs", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("cancelled", BigInteger, nullable=False),
    Column("expired", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("charged_tokens", BigInteger, nullable=False),
    Column("charged_nanos", BigInteger, nullable=False),
    Column("cost_nanos", BigInteger),
    Column("gpu_seconds", Float),
    Column("measured_tokens", BigInteger, nullable=False),
    Column("queue_ms", Float, nullable=False),
    Column("queued", BigInteger, nullable=False),
    Column("batch_sizes", BigInteger, nullable=False),
    Column("batched", BigInteger, nullable=False),
    Column("attained", BigInteger, nullable=False),
    Column("missed", BigInteger, nullable=False),
)

# The same for `gpu_time`.
gpu_rollups = Table(
    "gpu_rollups",
    metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),
    Column("worker", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("gpu_seconds", Float, nullable=False),
)

# A partial index: most runs have no parent.
HAS_PARENT = attempts.c.parent_run.is_not(None)
Index(
    "attempts_by_parent",
    attempts.c.tenant,
    attempts.c.parent_run,
    attempts.c.ended_at,
    sqlite_where=HAS_PARENT,
    postgresql_where=HAS_PARENT,
)

_BY_PARENT = "attempts_by_parent ON attempts (tenant, parent_run) WHERE parent_run IS NOT NULL"
UPGRADES: dict[int, tuple[tuple[str, str], ...]] = {
    1: (
        ("attempts", "ALTER TABLE attempts ADD COLUMN key_id TEXT"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN cost_nanos BIGINT"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN shared_with TEXT"),
        ("attempts", f"CREATE INDEX IF NOT EXISTS {_BY_PARENT}"),
    ),
    2: (),
    3: (("tenants", "ALTER TABLE tenants ADD COLUMN weight FLOAT NOT NULL DEFAULT 1"),),
    4: (),
    5: (
        ("attempts", "ALTER TABLE attempts ADD COLUMN template_id TEXT"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN attained BOOLEAN"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN batching_ms FLOAT"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN engine_batch FLOAT"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN batch_fill FLOAT"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN gpu_estimated BOOLEAN"),
    ),
    6: (
        ("attempts", "ALTER TABLE attempts ADD COLUMN decision TEXT"),
        ("documents", "CREATE INDEX IF NOT EXISTS documents_by_kind ON documents (kind, created_at)"),
        ("batch_items", "ALTER TABLE batch_items ADD COLUMN provider_batch TEXT"),
        ("attempts", "DROP INDEX IF EXISTS attempts_by_run"),
        ("attempts", "CREATE INDEX attempts_by_run ON attempts (tenant, run_id, ended_at)"),
        ("attempts", "DROP INDEX IF EXISTS attempts_by_parent"),
        (
            "attempts",
            "CREATE INDEX attempts_by_parent ON attempts (tenant, parent_run, ended_at) WHERE parent_run IS NOT NULL",
        ),
    ),
    7: (),
    8: (
        ("attempts", "ALTER TABLE attempts ADD COLUMN settings_version INTEGER"),
        ("attempts", "ALTER TABLE attempts ADD COLUMN composed TEXT"),
    ),
    9: (
        ("async_jobs", "DROP INDEX IF EXISTS async_jobs_by_status"),
        ("async_jobs", "CREATE INDEX async_jobs_by_status ON async_jobs (status, tenant, id)"),
    ),
}
"""Per earlier version: (table, statement) pairs that lead to the next. A statement is skipped where its table is
missing: new tables are created whole. Ledgers in PostgreSQL exist from version 7 on."""
