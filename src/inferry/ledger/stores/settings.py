"""Versions of the settings in the ledger's database. Methods block."""

from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy import Connection, Table, func, insert, select

from inferry.domain.settings_versions import ChangeKind, RunTally, SettingsChange, SettingsVersion
from inferry.domain.storage import Database
from inferry.ledger.schema import settings_changes, settings_versions
from inferry.ledger.settings_queries import query_tallies

_version_decoder = msgspec.json.Decoder(SettingsVersion)
_change_decoder = msgspec.json.Decoder(SettingsChange)

Decide = Callable[[SettingsChange | None], SettingsChange | None]
"""The latest change to the next one, whose number is filled in; None changes nothing."""


class SettingsStore:
    """Versions and changes have consecutive numbers from 1 on."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def versions(self) -> list[SettingsVersion]:
        """All versions, the latest first."""
        query = select(settings_versions.c.content).order_by(settings_versions.c.number.desc())
        with self._database.reading() as connection:
            return [_version_decoder.decode(content) for (content,) in connection.execute(query)]

    def version(self, number: int) -> SettingsVersion | None:
        query = select(settings_versions.c.content).where(settings_versions.c.number == number)
        with self._database.reading() as connection:
            content = connection.execute(query).scalar()
        return None if content is None else _version_decoder.decode(content)

    def changes(self, limit: int) -> list[SettingsChange]:
        """The latest changes, the latest first."""
        with self._database.reading() as connection:
            return _latest_changes(connection, limit)

    def latest_change(self) -> SettingsChange | None:
        return next(iter(self.changes(1)), None)

    def add(self, version: SettingsVersion) -> SettingsVersion:
        """Store a version under the next number."""
        with self._database.writing() as connection:
            version = msgspec.structs.replace(version, number=_next_number(connection, settings_versions))
            row = {"number": version.number, "created_at": version.created_at, "content": msgspec.json.encode(version)}
            connection.execute(insert(settings_versions).values(**row))
        return version

    def change(self, decide: Decide) -> SettingsChange | None:
        """Store the change that follows the latest one. Changes of several gateways follow one another."""
        with self._database.writing() as connection:
            change = decide(next(iter(_latest_changes(connection, 1)), None))
            if change is None:
                return None
            change = msgspec.structs.replace(change, number=_next_number(connection, settings_changes))
            row = {"number": change.number, "at": change.at, "content": msgspec.json.encode(change)}
            connection.execute(insert(settings_changes).values(**row))
        return change

    def last_file_change(self) -> SettingsChange | None:
        """The latest change that a configuration file made."""
        query = select(settings_changes.c.content).order_by(settings_changes.c.number.desc())
        with self._database.reading() as connection:
            changes = (_change_decoder.decode(content) for (content,) in connection.execute(query))
            return next((change for change in changes if change.kind is ChangeKind.FILE), None)

    def tallies(self, versions: Sequence[int], since: float, until: float | None) -> list[RunTally]:
        """What runs came to, of calls that arrived at or after `since` and ended before `until` (Unix seconds)."""
        with self._database.reading() as connection:
            return query_tallies(connection, versions, since, until)


def _latest_changes(connection: Connection, limit: int) -> list[SettingsChange]:
    query = select(settings_changes.c.content).order_by(settings_changes.c.number.desc()).limit(limit)
    return [_change_decoder.decode(content) for (content,) in connection.execute(query)]


def _next_number(connection: Connection, table: Table) -> int:
    return (connection.execute(select(func.max(table.c.number))).scalar() or 0) + 1
