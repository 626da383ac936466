"""The grain of every bound on order, in tokens: no job is overtaken out of turn by more than this at a time."""

from typing import Final

QUANTUM_TOKENS: Final = 2048
