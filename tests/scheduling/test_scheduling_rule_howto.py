"""The examples of docs/howto/add-a-scheduling-rule.md work as they are written."""

import re
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.lanes import Lane
from inferry.scheduling import rules
from inferry.scheduling import scheduler as scheduler_module
from inferry.scheduling.placement import scorer
from scheduling.scheduler_harness import a_scheduler, offer, placements, sent
from support.builders import a_job, a_policy, a_view

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "add-a-scheduling-rule.md"

# Compiled classes have no subclasses in plain Python: there a rule is compiled with the others.
pytestmark = pytest.mark.plain


def example(number: int) -> dict[str, Any]:
    """What a rule's file and its line in `rules.py` define."""
    names: dict[str, Any] = {**vars(scorer), **vars(rules)}
    for code in re.findall(r"```python\n(.*?)```", HOWTO.read_text(), re.DOTALL)[2 * number : 2 * number + 2]:
        exec(compile(code, str(HOWTO), "exec"), names)
    return names


def test_the_example_changes_where_long_prompts_go(monkeypatch: pytest.MonkeyPatch) -> None:
    names = example(0)
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


def test_the_second_example_holds_batch_jobs_with_a_prefix_for_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    window = a_policy(window="adaptive", coalesce_ms=400)
    live = a_policy(window="adaptive", coalesce_ms=400, ttft_ms=500)
    jobs = [a_job(name, lane=Lane.P2, prefix=("p",), at=at) for name, at in (("1", 0.0), ("2", 0.1))]

    def plans() -> list[list[str]]:
        scheduler = a_scheduler(a_view(), P1=live, P2=window)
        offer(scheduler, a_job("running"))
        scheduler.tick(0.0)
        offer(scheduler, *jobs, a_job("live", prefix=("p",), at=0.1))
        return [sent(scheduler.tick(0.1)), sent(scheduler.tick(0.4))]

    assert plans() == [["live", "1", "2"], []]
    monkeypatch.setattr(scheduler_module, "hold_rules", example(1)["hold_rules"])
    assert plans() == [["live"], ["1", "2"]]
