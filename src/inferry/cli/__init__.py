"""The command line: one module per command, the composition root and the configuration."""
