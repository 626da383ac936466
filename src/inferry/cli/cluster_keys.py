"""Secrets of the `cluster` section, which are in environment variables."""

import os

from inferry.cli.config.schema import ConfigError

MIN_CHARS = 16


def read_key(variable: str | None, setting: str) -> bytes:
    """The secret in the variable that a setting names. Raises ConfigError."""
    secret = os.environ.get(variable or "", "")
    if len(secret) < MIN_CHARS:
        raise ConfigError(f"the environment variable {variable} ({setting}) must have at least {MIN_CHARS} characters")
    return secret.encode()
