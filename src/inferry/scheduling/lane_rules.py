"""The lane table: what the policy of a lane means for the scheduler, in its own units."""

from bisect import bisect_left
from typing import Final

from inferry.domain.lanes import Lane, LanePolicy


class LaneRules:
    """The rules of one lane in one version of the settings. Times are seconds. Never changed.

    `version` is the number of the settings version, 0 where settings have no versions. `number` orders lanes: a smaller
    one goes first. `fill` is the part of a worker's capacity that the lane may use.
    `credit_per_token` is what it earns for every prompt token of a higher lane. `ttft_s` is its target for the first
    token; None in a batch lane. `groups` are the worker groups it may use, best first; None allows all of them.
    Runs of the highest lane never pause: `may_pause` is False there.
    `prompt_buckets` are the bounds of padded passes, in prompt tokens.
    """

    def __init__(self, lane: Lane, policy: LanePolicy, version: int = 0) -> None:
        if not (0 <= policy.share < 1 and 0 <= policy.reserve < 1):
            raise ValueError(f"{lane.name}: share and reserve are at least 0 and less than 1")
        self.lane: Final = lane
        self.version: Final = version
        self.number: Final = int(lane)
        self.is_live: Final = policy.is_live
        self.window: Final[str] = policy.window
        self.coalesce_s: Final[float] = policy.coalesce_ms / 1000
        self.max_wait_s: Final[float] = policy.max_wait_ms / 1000
        self.max_batch: Final = policy.max_batch
        self.queue_limit: Final = policy.queue_limit
        self.fill: Final[float] = 1.0 - policy.reserve
        self.has_share: Final = policy.share > 0
        self.credit_per_token: Final[float] = policy.share / (1 - policy.share)
        self.may_pause: Final = lane is not min(Lane)
        self.preemptible: Final = policy.preemptible
        self.may_preempt: Final = policy.may_preempt
        self.ttft_s: Final[float | None] = None if policy.ttft_ms is None else policy.ttft_ms / 1000
        self.groups: Final = policy.groups
        self.borrow_groups: Final = policy.borrow_groups
        self.prompt_buckets: Final = policy.prompt_buckets

    def prompt_bucket(self, prompt_tokens: int) -> int | None:
        """The bucket of prompts that share a padded pass; None where the lane has no buckets."""
        return bisect_left(self.prompt_buckets, prompt_tokens) if self.prompt_buckets else None
