"""The database of a world of leases: what outlives every process."""

from admission.builders import NOON
from inferry.domain.shared_limits import Holding, account_name
from inferry.domain.spending import Spending

TOKENS = account_name("run", "a", "root", "run", 0, "tokens")
NANOS = account_name("run", "a", "root", "run", 0, "nanos")
DAY_TOKENS = account_name("tenant", "a", "", "day", int(NOON // 86_400), "tokens")
Content = tuple[int, list[tuple[str, int, int]], list[Holding]]


class Database:
    """What outlives every process: rows of ended calls, holdings, and the generation."""

    def __init__(self) -> None:
        self.generation = 0
        self.tokens = self.nanos = 0
        self.holdings: dict[tuple[str, str], int] = {}

    def write(self, holder: str, generation: int, amounts: dict[str, int]) -> int:
        if generation == self.generation:
            for account, amount in amounts.items():
                self.holdings[holder, account] = amount
        return self.generation

    def read(self, holder: str) -> tuple[int, dict[str, int]]:
        return self.generation, {account: amount for (of, account), amount in self.holdings.items() if of == holder}

    def begin_rebuild(self) -> Content:
        self.generation += 1
        holdings = [Holding(*name, amount) for name, amount in self.holdings.items()]
        totals = [(TOKENS, self.tokens, 1), (NANOS, self.nanos, 1), (DAY_TOKENS, self.tokens, 1)]
        return self.generation, totals, holdings

    def spending(self) -> list[Spending]:
        day = Spending(tenant="a", period="day", tokens=self.tokens, nanos=self.nanos, at=NOON)
        return [
            day,
            Spending(tenant="a", period="run", tokens=self.tokens, nanos=self.nanos, at=NOON, run_id="root"),
        ]
