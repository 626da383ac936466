"""`kill -9` of a real gateway during batches: every item has one result, charged once. `make chaos` runs 100 seeds."""

from pathlib import Path

import pytest

from support.killed_batches import kill_while_batches_run


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_item_has_one_result_charged_once_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    kill_while_batches_run(tmp_path, seed)
