"""The ceilings of overflow as the ledger has them. Part of the composition root."""

from inferry.admission.overflow_budget import OverflowBudget
from inferry.admission.watermarks import WatermarkTracker
from inferry.cli.config.overflow import OverflowConfig
from inferry.domain.clock import Clock
from inferry.ledger.queries import LedgerQueries


def restored_overflow(
    config: OverflowConfig, run_reader: LedgerQueries | None, watermarks: WatermarkTracker | None, clock: Clock
) -> OverflowBudget | None:
    """The ceilings, with what the ledger has spent of them; None where overflow is off."""
    budget = config.budget(watermarks)
    if budget is not None and run_reader is not None:
        budget.restore(run_reader.overflow_spending(clock.wall()), clock.now(), clock.wall())
    return budget
