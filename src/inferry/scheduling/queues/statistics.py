"""What the queues show: service by tenant, how evenly it is shared, and what is queued ahead of a job."""

from collections.abc import Mapping, Sequence

from inferry.domain.lanes import Lane
from inferry.domain.plans import QueuedAhead
from inferry.scheduling.queues import fair_share
from inferry.scheduling.queues.lane_queue import LaneQueue


def service(lane_queues: Sequence[LaneQueue], history: Mapping[str, int]) -> dict[str, int]:
    """Tokens served to every tenant: those of closed accounts, and those of open ones."""
    served = dict(history)
    for lane_queue in lane_queues:
        for name, tenant in lane_queue.accounts.members.items():
            if tenant.served or name in served:
                served[name] = served.get(name, 0) + tenant.served
    return served


def jain_index(lane_queues: Sequence[LaneQueue], lane: Lane | None, history: Mapping[str, int]) -> float:
    """Jain's index of the tokens served, over their weights, to tenants that have jobs now.

    Of one lane it counts service since those tenants' accounts were opened; of all lanes, all service.
    """
    lane_queues = [lane_queue for lane_queue in lane_queues if lane is None or lane_queue.lane == lane]
    busy = [tenant for lane_queue in lane_queues for tenant in lane_queue.accounts.members.values() if tenant.active]
    if lane is not None:
        return fair_share.jain_index(tenant.served / tenant.weight for tenant in busy)
    served = service(lane_queues, history)
    weights = {tenant.name: tenant.weight for tenant in busy}
    return fair_share.jain_index(served.get(name, 0) / weight for name, weight in weights.items())


def ahead(lane_queues: Sequence[LaneQueue], lane: Lane, tenant: str | None) -> QueuedAhead:
    """What is queued before a job of this lane that would arrive now: all of higher lanes, and of its own lane what
    fair share serves before the tenant's next job. Without a tenant, all of its own lane.
    """
    parts = [
        lane_queue.ahead(tenant if lane_queue.lane == lane else None)
        for lane_queue in lane_queues
        if lane_queue.lane <= lane
    ]
    return QueuedAhead(
        sum([part.jobs for part in parts]),
        sum([part.prompt_tokens for part in parts]),
        sum([part.output_tokens for part in parts]),
    )
