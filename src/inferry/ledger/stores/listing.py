"""Pages of rows in the order of their creation."""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, select


def page_rows(
    connection: Connection,
    table: Table,
    query: Select[Any],
    scope: ColumnElement[bool],
    *,
    after: str | None,
    limit: int,
    newest_first: bool,
) -> tuple[list[Any], bool]:
    """Up to `limit` rows of the query, beginning behind the row with the id `after`, and whether there are more.

    `scope` is what `after` must be within; the listing behind an unknown row is empty.
    """
    c = table.c
    if after is not None:
        found = connection.execute(select(c.created_at).where(scope, c.id == after)).scalar()
        if found is None:
            return [], False
        is_older = (c.created_at == found) & (c.id < after) | (c.created_at < found)
        is_newer = (c.created_at == found) & (c.id > after) | (c.created_at > found)
        query = query.where(is_older if newest_first else is_newer)
    order = (c.created_at.desc(), c.id.desc()) if newest_first else (c.created_at, c.id)
    rows = connection.execute(query.where(scope).order_by(*order).limit(limit + 1)).mappings().all()
    return list(rows[:limit]), len(rows) > limit
