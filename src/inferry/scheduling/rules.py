"""The rules in use, in the order they are asked. A new rule is a file beside its siblings and a line here."""

from inferry.domain.decisions import RUNNING_BATCH, SIBLINGS, WINDOW
from inferry.scheduling.batching.fixed_hold import FixedHold
from inferry.scheduling.batching.hold_rule import HoldRule
from inferry.scheduling.batching.pass_hold import PassHold
from inferry.scheduling.batching.pass_window import PassDurations
from inferry.scheduling.batching.sibling_hold import SiblingHold
from inferry.scheduling.placement.affinity import Affinity
from inferry.scheduling.placement.cached_prefix import CachedPrefix, CachedPrefixAtAnyLoad
from inferry.scheduling.placement.filters import (
    Filter,
    has_adapter,
    has_precision,
    has_role,
    is_for_overflow,
    is_in_pool,
    serves_model,
)
from inferry.scheduling.placement.least_loaded import LeastLoaded
from inferry.scheduling.placement.scorer import Scorer

FILTERS: tuple[Filter, ...] = (serves_model, is_for_overflow, has_role, has_precision, has_adapter, is_in_pool)
"""All of them must allow a worker."""

SCORERS: tuple[Scorer, ...] = (
    CachedPrefix("cached_prefix", needs_affinity=True),
    Affinity("affinity", needs_affinity=True),
    LeastLoaded("least_loaded"),
    CachedPrefixAtAnyLoad("cached_prefix_at_any_load", needs_affinity=True),
)
"""The first that places the job decides."""


def hold_rules(pass_durations: PassDurations) -> tuple[HoldRule, ...]:
    """The first that holds the job decides."""
    return FixedHold(WINDOW), PassHold(RUNNING_BATCH, pass_durations), SiblingHold(SIBLINGS)
