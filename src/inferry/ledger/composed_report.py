"""The report of composed models: which models answered, how far they agreed, and what was saved."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, case, func, select

from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.proportions import wilson
from inferry.domain.reports import Cell, Column, Report, ReportQuery
from inferry.domain.settings_versions import Sections
from inferry.ledger.report_totals import period
from inferry.ledger.schema import attempts, composed_calls
from inferry.ledger.settings_queries import query_active_settings

_COLUMNS = (
    Column("name", "text", "Composed model."),
    Column("kind", "text", "route, cascade or ensemble."),
    Column("calls", "count", "Calls that were answered."),
    Column("answered_by", "text", "Models whose answers were used, with their calls, the most first."),
    Column("accepted", "count", "Of a cascade: calls that the small model answered."),
    Column("accepted_share", "ratio", "Their share."),
    Column("accepted_low", "ratio", "Wilson interval of the share, 95 %: lower end."),
    Column("accepted_high", "ratio", "Upper end."),
    Column("compared", "count", "Accepted answers that were compared with the large model's."),
    Column("agreed", "count", "Compared answers that were the same."),
    Column("agreement", "ratio", "Their share."),
    Column("agreement_low", "ratio", "Wilson interval of the agreement, 95 %: lower end."),
    Column("agreement_high", "ratio", "Upper end."),
    Column("vote_share", "ratio", "Of an ensemble that votes: mean part of the answers that agree with the one used."),
    Column("cost", "money", "Cost of all steps, compared calls included; empty without prices."),
    Column(
        "cost_large_only",
        "money",
        "Estimated cost of the same calls with one model alone: the large one of a cascade, the dearest of a route.",
    ),
    Column("saved", "ratio", "Part of that cost that was saved."),
)
_NOTES = (
    "cost_large_only of a cascade: what the large model's calls cost, and for each other call the mean of its compared "
    "calls, or of all its calls where none was compared.",
    "cost_large_only of a route: its calls' tokens at today's price of the dearest model that the active settings let "
    "it choose; empty unless each of these models has a price per token.",
)


class _Sums(NamedTuple):
    """Attempts of one stage that have a cost."""

    nanos: int = 0
    calls: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


_Stages = dict[tuple[str, str], _Sums]


def composed_report(connection: Connection, query: ReportQuery) -> Report:
    """One row for each composed model with calls that ended in the period."""
    row = composed_calls.c
    conditions = [row.ended_at >= query.since, row.ended_at < query.until]
    if query.tenant is not None:
        conditions.append(row.tenant == query.tenant)
    found = connection.execute(
        select(
            row.name,
            row.kind,
            func.count().label("calls"),
            func.sum(case((row.accepted, 1), else_=0)).label("accepted"),
            func.sum(case((row.accepted & row.agreed.is_not(None), 1), else_=0)).label("compared"),
            func.sum(case((row.accepted & row.agreed, 1), else_=0)).label("agreed"),
            func.avg(case((row.reason == "vote", row.score))).label("vote_share"),
        )
        .where(*conditions)
        .group_by(row.name, row.kind)
        .order_by(row.name)
        .limit(query.limit + 1)
    ).all()
    answered: dict[tuple[str, str], dict[str, int]] = {}
    paths = select(row.name, row.kind, row.path, func.count()).where(*conditions).group_by(row.name, row.kind, row.path)
    for name, kind, path, calls in connection.execute(paths):
        models, model = answered.setdefault((name, kind), {}), path.rpartition(">")[2]
        models[model] = models.get(model, 0) + calls
    stages, active = _stages(connection, query), query_active_settings(connection)
    sections = {} if active is None else active.sections
    rows = [
        _row(one, answered[one.name, one.kind], stages, _alone_nanos(one, stages, sections, query.prices))
        for one in found[: query.limit]
    ]
    return Report(
        name="composed",
        since=query.since,
        until=query.until,
        columns=_COLUMNS,
        rows=tuple(rows),
        notes=_NOTES,
        is_truncated=len(found) > query.limit,
    )


def score_pairs(connection: Connection, name: str, since: float) -> list[tuple[float, bool]]:
    """Score and agreement of every compared call of a cascade."""
    row = composed_calls.c
    found = select(row.score, row.agreed).where(
        row.name == name, row.ended_at >= since, row.score.is_not(None), row.agreed.is_not(None)
    )
    return [(score, bool(agreed)) for score, agreed in connection.execute(found)]


def _stages(connection: Connection, query: ReportQuery) -> _Stages:
    """Sums by name and stage, of steps with a price."""
    row = attempts.c
    tokens = (func.sum(row.prompt_tokens), func.sum(row.cached_tokens), func.sum(row.output_tokens))
    sums = (
        select(row.composed, func.sum(row.cost_nanos), func.count(row.job_id.distinct()), *tokens)
        .where(*period(query), row.composed.is_not(None), row.cost_nanos.is_not(None))
        .group_by(row.composed)
    )
    found: _Stages = {}
    for composed, *values in connection.execute(sums):
        name, _, stage = composed.rpartition("/")
        found[name, stage] = _Sums(*map(int, values))
    return found


def _alone_nanos(one: Any, stages: _Stages, sections: Sections, prices: Mapping[str, Price]) -> float | None:
    """What the calls would have cost with one model alone; None where that is not known."""
    if one.kind == "cascade":
        large, shadow = stages.get((one.name, "large"), _Sums()), stages.get((one.name, "shadow"), _Sums())
        sample = shadow if shadow.calls else large
        return large.nanos + int(one.accepted) * sample.nanos / sample.calls if sample.calls else None
    route, routed = sections.get("routes", {}).get(one.name), stages.get((one.name, "routed"))
    if one.kind != "route" or route is None or routed is None:
        return None
    labels = {} if route["classify"] is None else route["classify"]["labels"]
    models = {route["default"], *labels.values(), *(rule["model"] for rule in route["rules"])}
    composed = {name for section in ("routes", "cascades", "ensembles", "pipelines") for name in sections[section]}
    known = [prices.get(model, prices.get("*")) for model in models - composed]
    priced = [price for price in known if price is not None and price.is_per_token]
    if len(priced) < len(models):
        return None
    return max(price.nanos(routed.prompt, routed.cached, routed.output) for price in priced)


def _row(one: Any, answered: dict[str, int], stages: _Stages, alone: float | None) -> tuple[Cell, ...]:
    calls, accepted, compared, agreed = int(one.calls), int(one.accepted), int(one.compared), int(one.agreed)
    is_cascade = one.kind == "cascade"
    spent = [sums.nanos for (name, _), sums in stages.items() if name == one.name]
    cost = sum(spent) if spent else None
    most_first = sorted(answered.items(), key=lambda pair: (-pair[1], pair[0]))
    return (
        *(one.name, one.kind, calls, ", ".join(f"{model}: {count}" for model, count in most_first)),
        *((accepted, accepted / calls, *wilson(accepted, calls)) if is_cascade else (None,) * 4),
        *((compared, agreed, agreed / compared if compared else None) if is_cascade else (None,) * 3),
        *(wilson(agreed, compared) if compared else (None, None)),
        *(one.vote_share, _money(cost), _money(alone), None if cost is None or not alone else 1 - cost / alone),
    )


def _money(nanos: float | None) -> float | None:
    return None if nanos is None else nanos / NANOS_PER_UNIT
