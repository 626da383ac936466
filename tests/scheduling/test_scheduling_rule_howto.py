"""The example of docs/howto/add-a-scheduling-rule.md works as it is written."""

import re
from pathlib import Path
from typing import Any

import pytest

from inferry.scheduling import rules
from inferry.scheduling import scheduler as scheduler_module
from inferry.scheduling.placement import scorer
from scheduling.scheduler_harness import a_scheduler, offer, placements
from support.builders import a_job, a_view

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "add-a-scheduling-rule.md"

# Compiled classes have no subclasses in plain Python: there a rule is compiled with the others.
pytestmark = pytest.mark.plain


def test_the_example_changes_where_long_prompts_go(monkeypatch: pytest.MonkeyPatch) -> None:
    code, wiring = re.findall(r"```python\n(.*?)```", HOWTO.read_text(), re.DOTALL)
    names: dict[str, Any] = {**vars(scorer), **vars(rules)}
    exec(compile(code, str(HOWTO), "exec"), names)
    exec(compile(wiring, str(HOWTO), "exec"), names)
    assert [*rules.SCORERS] != [*names["SCORERS"]]

    # Both workers are idle; the least loaded is the first by name.
    views = a_view("a", kv_tokens=10_000), a_view("b", kv_tokens=20_000)
    jobs = a_job("long", tokens=5_000), a_job("short", tokens=10)
    before = a_scheduler(*views)
    offer(before, jobs[0])
    assert placements(before.tick(0.0)) == {"long": "a"}

    monkeypatch.setattr(scheduler_module, "SCORERS", names["SCORERS"])
    after = a_scheduler(*views)
    offer(after, *jobs)
    assert placements(after.tick(0.0)) == {"long": "b", "short": "a"}
