"""The grain of every bound on order, in tokens: no job is overtaken out of turn by more than this at a time."""

QUANTUM_TOKENS = 2048
