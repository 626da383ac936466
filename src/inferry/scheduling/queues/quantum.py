"""The grain of every promise about order, in tokens: nobody is overtaken out of turn by more than this at a time."""

QUANTUM_TOKENS = 2048
