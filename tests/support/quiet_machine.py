"""A machine that is never too busy for the diagnosis, which says so also where there were no calls."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inferry.observe.diagnosis import availability


@contextmanager
def a_quiet_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(availability, "MAX_LAG_MS", math.inf)
        yield
