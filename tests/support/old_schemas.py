"""Ledgers of earlier schema versions."""

import re
import sqlite3

from inferry.ledger.schema import UPGRADES


def undo_upgrades(raw: sqlite3.Connection, version: int) -> None:
    """Take the columns away that schemas after `version` have added."""
    for older, statements in UPGRADES.items():
        for table, statement in statements if older >= version else ():
            if added := re.fullmatch(r"ALTER TABLE \w+ ADD COLUMN (\w+) .*", statement):
                raw.execute(f"ALTER TABLE {table} DROP COLUMN {added[1]}")
    raw.execute(f"PRAGMA user_version = {version}")
