"""The reference pages name every difference from vLLM's own endpoints that the comparison allows."""

from pathlib import Path

import pytest

from support.vllm_differences import MESSAGES, RESPONSES, Difference, table

PAGES = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize(("page", "differences"), [("messages", MESSAGES), ("responses", RESPONSES)])
def test_the_page_has_the_differences(page: str, differences: tuple[Difference, ...]) -> None:
    assert table(differences) in (PAGES / f"{page}.md").read_text()
