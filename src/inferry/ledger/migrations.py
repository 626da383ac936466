"""Creates the tables of the ledger's database and migrates those of earlier releases. The same for every database
system: only where the version is stored differs."""

from sqlalchemy import Connection, inspect

from inferry.domain.ledger import LedgerMissing, LedgerUnusable
from inferry.ledger.schema import SCHEMA_VERSION, UPGRADES
from inferry.ledger.storage_schema import metadata


def check_version(version: int, name: str) -> int:
    """Raises LedgerUnusable for the schema of a newer release."""
    if version > SCHEMA_VERSION:
        raise LedgerUnusable(
            f"the ledger {name} was written by a newer release (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade, or choose another ledger"
        )
    return version


def check_readable(version: int, name: str) -> None:
    """Raises LedgerUnusable where the tables are not those of this release."""
    if version == 0:
        raise LedgerMissing(f"{name} contains no ledger yet")
    if check_version(version, name) < SCHEMA_VERSION:
        raise LedgerUnusable(
            f"the ledger {name} is of an earlier release (schema {version}, this one reads {SCHEMA_VERSION}); "
            "start the gateway with it once to migrate it"
        )


def migrate(connection: Connection, version: int) -> None:
    """Bring the tables from `version` (0: there are none) to the current one. The caller stores the version."""
    tables = inspect(connection).get_table_names()
    for older in range(version, SCHEMA_VERSION) if version else ():
        for table, statement in UPGRADES[older]:
            if table in tables:
                connection.exec_driver_sql(statement)
    metadata.create_all(connection)
