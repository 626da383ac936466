"""What runs came to with each version of the settings, and the calls that a simulation replays. Portable SQL."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, and_, case, func, or_, select

from inferry.domain.ledger import Outcome
from inferry.domain.settings_versions import RunTally, SettingsChange, SettingsVersion
from inferry.domain.traffic import RecordedCall
from inferry.ledger.measures import total
from inferry.ledger.schema import attempts, settings_changes, settings_versions

_row = attempts.c
_FAILED = (Outcome.FAILED.value, Outcome.EXPIRED.value)
MAX_CALLS = 50_000
"""Calls that are replayed, the latest: bounds the time of a simulation."""


def query_tallies(connection: Connection, versions: Sequence[int], since: float, until: float | None) -> list[RunTally]:
    """One tally per run, lane and version, of calls that arrived at or after `since`. Preempted attempts and
    prefills have a later one; calls that shared an execution were not scheduled. A call that did not complete counts
    for attainment only if its next token was late: clients that give up must not make a slow version look fast.
    """
    return [
        RunTally(
            version=version,
            run=f"{tenant}\0{run_id}",
            lane=lane,
            calls=calls,
            judged=judged_calls,
            attained=attained_calls,
            failed=failed_calls,
            output_tokens=output_tokens,
            seconds=seconds,
            cost_nanos=int(cost_nanos),
            gpu_seconds=gpu_seconds,
        )
        for (
            version,
            tenant,
            run_id,
            lane,
            calls,
            judged_calls,
            attained_calls,
            failed_calls,
            output_tokens,
            seconds,
            cost_nanos,
            gpu_seconds,
        ) in connection.execute(_tally_query(versions, since, until))
    ]


def _tally_query(versions: Sequence[int], since: float, until: float | None) -> Select[Any]:
    is_late, is_done = _row.attained.is_(False), _row.outcome == Outcome.DONE.value
    is_attained = and_(_row.attained.is_(True), is_done)
    attained = case((is_attained, 1), else_=0)
    judged = case((or_(is_attained, is_late), 1), else_=0)
    failed = case((_row.outcome.in_(_FAILED), 1), else_=0)
    return (
        select(
            _row.settings_version,
            _row.tenant,
            _row.run_id,
            _row.lane,
            func.count(),
            total(judged),
            total(attained),
            total(failed),
            total(_row.output_tokens),
            func.sum(_row.total_ms) / 1000,
            func.coalesce(total(_row.cost_nanos), 0),
            func.coalesce(func.sum(_row.gpu_seconds), 0.0),
        )
        .where(
            _row.ended_at >= since,
            *(() if until is None else (_row.ended_at < until,)),
            _row.ended_at - _row.total_ms / 1000 >= since,
            _row.settings_version.in_(versions),
            _row.shared_with.is_(None),
            _row.outcome.not_in((Outcome.PREEMPTED.value, Outcome.PREFILLED.value)),
            or_(_row.outcome != Outcome.CANCELLED.value, is_late),
        )
        .group_by(_row.settings_version, _row.tenant, _row.run_id, _row.lane)
    )


def query_calls(connection: Connection, since: float, until: float) -> list[RecordedCall]:
    """The calls that ended in the period, in the order of their arrival: times, tokens and names, no content."""
    arrived_at = (_row.ended_at - _row.total_ms / 1000).label("arrived_at")
    query = (
        select(
            arrived_at,
            _row.tenant,
            _row.run_id,
            _row.model,
            _row.lane,
            _row.template_id,
            _row.prompt_tokens,
            _row.cached_tokens,
            _row.output_tokens,
            _row.queue_ms,
            _row.first_token_ms,
            _row.total_ms,
            _row.engine_batch,
            _row.attained,
            _row.cost_nanos,
            _row.gpu_seconds,
        )
        .where(
            _row.ended_at >= since,
            _row.ended_at < until,
            _row.shared_with.is_(None),
            _row.outcome == Outcome.DONE.value,
            _row.first_token_ms.is_not(None),
        )
        .order_by(_row.ended_at.desc())
        .limit(MAX_CALLS)
    )
    calls = [RecordedCall(**row) for row in connection.execute(query).mappings()]
    return sorted(calls, key=lambda call: call.arrived_at)


def query_active_settings(connection: Connection) -> SettingsVersion | None:
    """The version that the latest change made or left active."""
    latest = select(settings_changes.c.content).order_by(settings_changes.c.number.desc()).limit(1)
    content = connection.execute(latest).scalar()
    if content is None:
        return None
    active = msgspec.json.decode(content, type=SettingsChange).active
    version = select(settings_versions.c.content).where(settings_versions.c.number == active)
    return msgspec.json.decode(connection.execute(version).scalar_one(), type=SettingsVersion)
