"""Hold jobs for a pass, which cannot be joined once it runs: a padded pass, or one request for several pooled jobs.

While every worker is in a pass, holding costs nothing. Before an idle worker it costs the wait of the held jobs, and
saves almost a pass for every job that arrives in time. Where workers batch continuously, a second pass may run beside
the first, so pooled jobs wait for the window at most.
"""

from math import inf

from inferry.scheduling.batching.hold_rule import HoldRule
from inferry.scheduling.batching.pass_window import PassDurations
from inferry.scheduling.queues.lane_queue import RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob

PASS_FRACTION = 0.25
"""The longest hold before an idle worker, as a part of a pass: a job that arrives meanwhile gains three times that."""
MIN_EXPECTED_FOLLOWERS = 0.75
"""The jobs that must be expected in that time: one that nearly always arrives is enough."""


class PassHold(HoldRule):
    def __init__(self, name: str, pass_durations: PassDurations) -> None:
        super().__init__(name)
        self._pass_durations = pass_durations

    def hold_until(self, entry: QueuedJob, queue: RouteQueue, now: float) -> float | None:
        route = queue.route
        if not route.all_pad and not (route.is_pooled and not route.any_pads):
            return None
        followers, coalesce_s = queue.followers, queue.rules.coalesce_s
        is_follower = followers.arrived(now)
        if not route.has_free_pass():
            return inf
        if not is_follower:
            pass_s = self._pass_durations.shortest_s(route.workers)
            followers.open_window(now + (coalesce_s if pass_s is None else min(coalesce_s, PASS_FRACTION * pass_s)))
        return followers.window_ends_at if followers.expected_followers >= MIN_EXPECTED_FOLLOWERS else None
