"""The `overflow` section of the configuration."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from inferry.admission.overflow_budget import OverflowBudget
from inferry.admission.watermarks import WatermarkTracker
from inferry.cli.config.checks import check_range
from inferry.cli.config.tenants import PriceConfig
from inferry.cli.config.workers import OpenAIWorkerConfig, WorkerConfig
from inferry.domain.keys import is_valid_tenant_name


class OverflowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls whose deadline or TTFT target cannot be met on own workers go to workers with `overflow: true`. See
    [Overflow](../howto/overflow.md)."""

    day_money_ceiling: float | None = None
    """Most that the overflow of one tenant may cost in a UTC day, at the `prices` below. null turns overflow off."""
    run_money_ceiling: float | None = None
    """Most that the overflow of one run and its sub-runs may cost. null sets no limit beside the tenant's."""
    tenants: dict[str, float] = {}
    """Day ceilings of single tenants, in place of `day_money_ceiling`. 0 keeps the calls of a tenant on own workers."""
    prices: dict[str, PriceConfig] = {}
    """Prices per token of the hosted workers, by model name; `*` is any other model. A call whose model has no price
    per token does not overflow. What tenants pay for a call is in the other section `prices`."""

    def budget(self, watermarks: WatermarkTracker | None) -> OverflowBudget | None:
        """The accounts of overflow; None where it is off. Without a database they have no watermarks."""
        if self.day_money_ceiling is None:
            return None
        prices = {model: price.price() for model, price in self.prices.items()}
        return OverflowBudget(prices, self.day_money_ceiling, self.run_money_ceiling, self.tenants, watermarks)


def check_overflow(overflow: OverflowConfig, workers: Sequence[WorkerConfig], *, is_shared: bool) -> Iterator[str]:
    """Error messages for invalid values. `is_shared`: several gateways share limits."""
    yield from check_range("overflow", overflow, 0, 1e9, "day_money_ceiling", "run_money_ceiling")
    for name, ceiling in overflow.tenants.items():
        if not is_valid_tenant_name(name):
            yield f"overflow.tenants.{name}: a name is 1 to 64 letters, digits, dots, dashes and underscores"
        if not 0 <= ceiling <= 1e9:
            yield f"overflow.tenants.{name} must be between 0 and 1e+09"
    for model, price in overflow.prices.items():
        if not price.price().is_per_token or min(price.input, price.output, price.cached_input or 0.0) < 0:
            yield f"overflow.prices.{model} needs a price per token, and none below 0"
    for worker in workers:
        if isinstance(worker, OpenAIWorkerConfig) and worker.overflow and overflow.day_money_ceiling is None:
            yield f"worker {worker.name} has overflow: true, which requires overflow.day_money_ceiling"
    if overflow.day_money_ceiling is not None:
        if not overflow.prices:
            yield "overflow.prices is empty: name what the hosted workers cost per token"
        if is_shared:
            yield "overflow cannot be used with cluster.redis: its ceilings are counted by one gateway"
