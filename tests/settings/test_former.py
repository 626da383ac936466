"""Which version a rollback makes active again."""

import pytest

from inferry.domain.settings_versions import ChangeKind, SettingsChange
from inferry.settings.former import former_version

KINDS = {"file": ChangeKind.FILE, "apply": ChangeKind.APPLY, "trial": ChangeKind.TRIAL, "back": ChangeKind.ROLLBACK}


def former(*changes: str) -> int | None:
    """`apply 2`: the kind of a change and the version active after it, the oldest first."""
    made = [
        SettingsChange(number=number, at=float(number), kind=KINDS[kind], active=int(active))
        for number, (kind, active) in enumerate((one.split() for one in changes), 1)
    ]
    return former_version(made[::-1])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], None),
        (["file 1"], None),
        (["file 1", "apply 2"], 1),
        (["file 1", "trial 1", "apply 2"], 1),
        (["file 1", "apply 2", "apply 1"], 2),
        (["file 1", "apply 2", "back 1", "apply 3"], 1),
    ],
)
def test_the_version_before_the_active_one_is_returned_to(changes: list[str], expected: int | None) -> None:
    assert former(*changes) == expected


def test_a_version_that_was_rolled_back_is_skipped() -> None:
    assert former("file 1", "apply 2", "back 1") is None
    assert former("file 1", "apply 2", "apply 3", "back 2") == 1
    assert former("file 1", "apply 2", "apply 3", "back 2", "back 1") is None


def test_a_version_whose_first_change_is_no_longer_listed_counts_as_the_first() -> None:
    assert former("apply 5", "apply 6", "back 4") is None
    assert former("apply 5", "back 4", "apply 6") == 4
