"""The `storage` section of the configuration: what is stored for tenants, how much, and for how long."""

from collections.abc import Iterator

from inferry.cli.config.checks import check_positive
from inferry.domain.storage import StorageLimits


class StorageConfig(StorageLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stored responses, files, batches and async jobs, in the ledger's database."""


def check_storage(config: StorageConfig) -> Iterator[str]:
    yield from check_positive("storage", config, *(name for name in config.__struct_fields__ if name != "store"))
