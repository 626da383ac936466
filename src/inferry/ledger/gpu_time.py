"""Which GPU time of a worker is work, which is waste and of which kind, and which is idle or unattributed. Pure.

Busy time counts as work first. Whether it was waste is known when its attempt ends; the seconds are then moved from
work to their kind. A move never makes the work of an interval negative: the rest is moved in the next one. So the kinds
of every interval add up to its length times the GPUs, and every kind only grows.
"""

from inferry.domain.attempts import Attempt
from inferry.domain.ledger import GpuTimeKind, Outcome

_MOVED = (GpuTimeKind.CANCELLED, GpuTimeKind.PREEMPTED, GpuTimeKind.RECOMPUTED, GpuTimeKind.UNATTRIBUTED)


class GpuTimeBook:
    """GPU-seconds by kind, in total and since the last row. `utilisation` is the busy part of the last interval."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.totals = dict.fromkeys(GpuTimeKind, 0.0)
        self.since_row = dict.fromkeys(GpuTimeKind, 0.0)
        self.utilisation = 0.0
        self._to_move = dict.fromkeys(_MOVED, 0.0)

    def move(self, kind: GpuTimeKind, gpu_seconds: float) -> None:
        """GPU-seconds that were counted as work, or will be, are of this kind."""
        if kind is not GpuTimeKind.WORK and gpu_seconds > 0:
            self._to_move[kind] += gpu_seconds

    def close_interval(self, wall_s: float, busy_s: float) -> None:
        """Add an interval in which the engine was busy for `busy_s` of `wall_s` seconds."""
        busy_s = min(max(busy_s, 0.0), wall_s)
        self.utilisation = busy_s / wall_s if wall_s > 0 else 0.0
        work = busy_s * self.gpus
        self._add(GpuTimeKind.IDLE, (wall_s - busy_s) * self.gpus)
        for kind in _MOVED:
            moved = min(work, self._to_move[kind])
            self._to_move[kind] -= moved
            work -= moved
            self._add(kind, moved)
        self._add(GpuTimeKind.WORK, work)

    def take_row(self) -> dict[GpuTimeKind, float]:
        """GPU-seconds by kind since the last call."""
        taken = self.since_row
        self.since_row = dict.fromkeys(GpuTimeKind, 0.0)
        return taken

    def _add(self, kind: GpuTimeKind, gpu_seconds: float) -> None:
        self.totals[kind] += gpu_seconds
        self.since_row[kind] += gpu_seconds


def waste_of(attempt: Attempt, outcome: Outcome) -> tuple[GpuTimeKind, float]:
    """The waste of an ended attempt: its kind, and GPU-seconds. `WORK` and 0 if there is none."""
    seconds = attempt.gpu_seconds or 0.0
    if outcome in (Outcome.CANCELLED, Outcome.EXPIRED):
        return GpuTimeKind.CANCELLED, seconds
    if outcome not in (Outcome.DONE, Outcome.PREFILLED) and not attempt.resumed:
        return (GpuTimeKind.PREEMPTED if outcome is Outcome.PREEMPTED else GpuTimeKind.RECOMPUTED), seconds
    if attempt.job.resume_point is not None:
        # The output so far is computed again as part of the prompt.
        return GpuTimeKind.RECOMPUTED, min(seconds, attempt.gpu_prefill_seconds)
    return GpuTimeKind.WORK, 0.0
