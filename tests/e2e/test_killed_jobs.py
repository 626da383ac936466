"""`kill -9` of a real gateway during async jobs with callbacks: every job has one result, charged once, and every
callback is delivered. `make chaos` runs 100 seeds."""

from pathlib import Path

import pytest

from support.killed_jobs import kill_while_jobs_run


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_job_has_one_result_charged_once_and_its_callback_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    kill_while_jobs_run(tmp_path, seed)
