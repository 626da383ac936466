"""The version that a rollback makes active again. Pure."""

from collections.abc import Sequence

from inferry.domain.settings_versions import ChangeKind, SettingsChange


def former_version(changes: Sequence[SettingsChange]) -> int | None:
    """The version that was active before the active one; None where there is none. The latest change is first.

    A version that was rolled back is not returned to: the next rollback goes further back.
    """
    active: list[int] = []
    for change in reversed(changes):
        if change.kind is ChangeKind.ROLLBACK:
            # A change that is no longer listed made the version active.
            active = active[: active.index(change.active) + 1] if change.active in active else [change.active]
        elif not active or active[-1] != change.active:
            active.append(change.active)
    return active[-2] if len(active) > 1 else None
