"""Trees of runs: a run with its sub-runs, theirs, and so on. Budgets of runs are for whole trees."""

from collections.abc import Sequence

from sqlalchemy import CTE, ColumnElement, FromClause, and_, func, or_, select

from inferry.ledger.schema import HAS_PARENT, attempts

_row = attempts.c


def run_tree(tenant: str, run: str) -> CTE:
    """The ids of the run and its descendants, as `run_id`."""
    is_top = or_(_row.run_id == run, _row.parent_run == run)
    below = select(_row.run_id).where(_row.tenant == tenant, is_top).cte("below", recursive=True)
    # UNION removes duplicates, so the recursion ends even where rows form a cycle.
    return below.union(select(_row.run_id).where(_row.tenant == tenant, _row.parent_run == below.c.run_id))


def with_roots(conditions: Sequence[ColumnElement[bool]]) -> tuple[FromClause, ColumnElement[str]]:
    """The attempts, and the root of each one's run. `conditions` select the attempts that are read.

    A parent without attempts of its own is a root too. A run in a cycle is its own root.
    """
    roots = _roots(conditions)
    return attempts.outerjoin(roots, _is_run(roots)), func.coalesce(roots.c.root, _row.run_id)


def tree_members(roots: CTE) -> CTE:
    """`tenant`, `root` and `run_id` of the roots' runs and all their descendants. `roots` has the first two."""
    members = select(roots.c.tenant, roots.c.root, roots.c.root.label("run_id")).cte("members", recursive=True)
    return members.union(
        select(_row.tenant, members.c.root, _row.run_id).where(
            _row.tenant == members.c.tenant, _row.parent_run == members.c.run_id
        )
    )


def _roots(conditions: Sequence[ColumnElement[bool]]) -> CTE:
    """`tenant`, `run_id` and `root` of the sub-runs with such an attempt."""
    parents = _parents(conditions)
    ancestors = (
        select(_row.tenant, _row.run_id, _row.parent_run.label("ancestor"))
        .where(*conditions, HAS_PARENT)
        .distinct()
        .cte("ancestors", recursive=True)
    )
    ancestors = ancestors.union(
        select(ancestors.c.tenant, ancestors.c.run_id, parents.c.parent).where(
            _is_of(parents, ancestors), parents.c.parent.is_not(None)
        )
    )
    return (
        select(ancestors.c.tenant, ancestors.c.run_id, func.max(ancestors.c.ancestor).label("root"))
        .select_from(ancestors.outerjoin(parents, _is_of(parents, ancestors)))
        .where(parents.c.parent.is_(None))
        .group_by(ancestors.c.tenant, ancestors.c.run_id)
        .cte("roots")
    )


def _parents(conditions: Sequence[ColumnElement[bool]]) -> CTE:
    """`tenant`, `run_id` and `parent` of the ancestors; a root has no parent."""
    # Each ancestor is looked up once, however many sub-runs it has, and by its own rows: with a condition on
    # `parent_run`, SQLite would search the index of parents instead. A root adds a row without an id.
    above = (
        select(_row.tenant, _row.parent_run.label("run_id"))
        .where(*conditions, HAS_PARENT)
        .distinct()
        .cte("above", recursive=True)
    )
    above = above.union(select(_row.tenant, _row.parent_run).where(_is_run(above)))
    parent = select(func.max(_row.parent_run)).where(_is_run(above)).scalar_subquery()
    return select(above.c.tenant, above.c.run_id, parent.label("parent")).cte("parents")


def _is_run(runs: CTE) -> ColumnElement[bool]:
    return and_(_row.tenant == runs.c.tenant, _row.run_id == runs.c.run_id)


def _is_of(parents: CTE, ancestors: CTE) -> ColumnElement[bool]:
    return and_(parents.c.tenant == ancestors.c.tenant, parents.c.run_id == ancestors.c.ancestor)
