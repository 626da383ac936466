"""A running gateway rolls old rows up; its reports and budgets do not change."""

import time
from contextlib import closing
from pathlib import Path

from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from ledger.builders import an_entry
from support.scripted_gateway import ScriptedGateway

DAY = 86_400.0


def test_the_sweeper_of_a_gateway_applies_the_retention(tmp_path: Path, ledger_url: str) -> None:
    now = time.time()
    rows = [
        an_entry(days, run_id=f"run {days}", ended_at=now - days * DAY, prompt_tokens=5) for days in range(0, 20, 3)
    ]
    with closing(AttemptStore(ledger_url)) as ledger:
        ledger.append(rows)
    with open_queries(ledger_url) as queries:
        before = queries.tenants()
        config = {"ledger": ledger_url, "retention": {"attempts_days": 10}}
        with ScriptedGateway(tmp_path, config) as gateway:
            gateway.run(gateway.service.storage.sweeper.sweep())
        assert {entry.run_id for entry in queries.jobs()} == {"run 0", "run 3", "run 6", "run 9"}
        assert queries.tenants() == before
