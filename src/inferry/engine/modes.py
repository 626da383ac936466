"""The planner of each mode."""

from inferry.domain.workers import EngineMode
from inferry.engine.hybrid_planner import HybridPlanner
from inferry.engine.padded_planner import PaddedPlanner
from inferry.engine.planner import ContinuousPlanner, Planner

_PLANNERS: dict[EngineMode, Planner] = {
    "continuous": ContinuousPlanner(),
    "hybrid": HybridPlanner(),
    "dynamic": PaddedPlanner(refills=True),
    "static": PaddedPlanner(refills=False),
}


def planner_of(mode: EngineMode) -> Planner:
    """The planner of an engine's first step."""
    return _PLANNERS[mode]
