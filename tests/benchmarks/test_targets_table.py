"""The table of goals in capacity.md is what the results say."""

from benchmarks import targets_table


def test_the_table_is_what_the_results_say() -> None:
    page = targets_table.PAGE.read_text()
    assert page == targets_table.with_table(page)


def test_what_misses_its_goal_is_bold() -> None:
    rows = {line.split("|")[1].strip(): line for line in targets_table.table().splitlines()[2:]}
    assert "**broken**" in rows["coding, first minute"]
    assert "kept, 10 of 10" in rows["harbor"]
    assert f"**0.92{targets_table.TIMES}**" in rows["harbor"]
    assert "| 0.97 |" in rows["azure 0.5"]
    assert "**0.90**, **0.80**" in rows["azure 0.5"]
    assert "1.00, 0.99 | 0.97" in rows["harbor 0.5"]
