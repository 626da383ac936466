"""Secrets of a configuration that are read from environment variables (`$NAME`)."""

from collections.abc import Iterator, Mapping, Sequence

from inferry.cli.config.workers import WorkerConfig

_FIELDS = ("api_key", "salt_secret")
_LISTS = ("api_keys",)


def secret_variable(secret: str) -> str | None:
    """The environment variable that holds the secret; None for a literal secret."""
    return secret[1:] if secret.startswith("$") else None


def unset_secrets(workers: Sequence[WorkerConfig], where: str, env: Mapping[str, str]) -> Iterator[str]:
    """One error message per unset environment variable, with its path below `where`."""
    for index, worker in enumerate(workers):
        for path, secret in _secrets(worker):
            variable = secret_variable(secret)
            if variable is not None and not env.get(variable):
                yield f"{where}[{index}].{path}: the environment variable {variable} is not set"


def _secrets(worker: WorkerConfig) -> Iterator[tuple[str, str]]:
    for name in _FIELDS:
        secret = getattr(worker, name, None)
        if secret:
            yield name, secret
    for name in _LISTS:
        for number, secret in enumerate(getattr(worker, name, ())):
            yield f"{name}[{number}]", secret
