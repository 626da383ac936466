"""The sections of the configuration that have versions, how two versions differ, and what may differ between runs."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from inferry.domain.settings_versions import Sections

RUN_KEYS = frozenset({"window", "coalesce_ms", "max_wait_ms", "max_batch"})
"""Keys of a lane that belong to a job. All others belong to the lane or to a worker as a whole: a share is of all jobs
of the lane, and a target is what the capacity of a worker is computed from and what attainment is measured against.
"""


TARGET_KEYS = frozenset({"ttft_ms", "itl_ms", "ttft_ms_per_1k_tokens"})
"""Keys of a lane that attainment is measured against."""


class Difference(Struct, frozen=True):
    """A value that differs. None: the value is missing."""

    path: tuple[str, ...]
    before: Any
    after: Any

    @property
    def name(self) -> str:
        return ".".join(self.path)


def _is_lane_run_key(changed: Difference) -> bool:
    return changed.path[-1] in RUN_KEYS


def _keeps_model(changed: Difference) -> bool:
    """A model that is removed for some runs would be unknown to clients that do not know of the trial."""
    return len(changed.path) != 2 or changed.after is not None


COMPOSED = ("routes", "cascades", "ensembles", "pipelines")
"""Sections of composed models."""
VERSIONED: dict[str, Callable[[Difference], bool]] = {
    "lanes": _is_lane_run_key,
    **dict.fromkeys(COMPOSED, _keeps_model),
}
"""Sections with versions. The function says whether a value may differ between runs."""


def differences(before: Sections, after: Sections) -> list[Difference]:
    """What changes, in the order of the keys."""
    return list(_differences((), before, after))


def _differences(path: tuple[str, ...], before: Any, after: Any) -> Iterator[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from _differences((*path, str(key)), before.get(key), after.get(key))
    elif _plain(before) != _plain(after):
        yield Difference(path, before, after)


def _plain(value: Any) -> Any:
    """Lists and tuples are equal if their items are."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def whole_only(changed: list[Difference]) -> list[Difference]:
    """The differences that cannot be tried with some runs only."""
    return [one for one in changed if not VERSIONED[one.path[0]](one)]


def retargeted(changed: list[Difference]) -> set[str]:
    """Lanes with other targets: attainment of the two versions cannot be compared."""
    return {one.path[1] for one in changed if one.path[0] == "lanes" and one.path[-1] in TARGET_KEYS}


def calls_other_models(changed: list[Difference]) -> bool:
    """Whether composed models differ."""
    return any(one.path[0] in COMPOSED for one in changed)
