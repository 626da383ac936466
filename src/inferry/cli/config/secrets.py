"""Secrets of workers: literal, or read from environment variables (`$NAME`).

An API key is sent in a header, so it must be printable ASCII. Error messages never contain a secret.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from inferry.cli.config.workers import WorkerConfig

_FIELDS = ("api_key", "salt_secret")
_LISTS = ("api_keys",)
_HEADER_TEXT = re.compile(r"[\x21-\x7e]+")


def secret_variable(secret: str) -> str | None:
    """The environment variable that holds the secret; None for a literal secret."""
    return secret[1:] if secret.startswith("$") else None


def variable_error(path: str, variable: str, env: Mapping[str, str]) -> str | None:
    """Why the environment variable cannot be the secret at this path of a worker; None if it can."""
    text = env.get(variable)
    problem = "is not set" if not text else _text_error(path, text)
    return None if problem is None else f"the environment variable {variable} {problem}"


def check_literal_secrets(worker: WorkerConfig) -> Iterator[str]:
    """One error message per invalid literal secret of a worker. It begins with the path of the secret."""
    for path, secret in _secrets(worker):
        if secret_variable(secret) is None and (problem := _text_error(path, secret)) is not None:
            yield f"{path} {problem}"


def check_secret_variables(workers: Sequence[WorkerConfig], where: str, env: Mapping[str, str]) -> Iterator[str]:
    """One error message per unset or invalid environment variable, with its path below `where`."""
    for index, worker in enumerate(workers):
        for path, secret in _secrets(worker):
            variable = secret_variable(secret)
            if variable is not None and (problem := variable_error(path, variable, env)) is not None:
                yield f"{where}[{index}].{path}: {problem}"


def _secrets(worker: WorkerConfig) -> Iterator[tuple[str, str]]:
    for name in _FIELDS:
        secret = getattr(worker, name, None)
        if secret:
            yield name, secret
    for name in _LISTS:
        for number, secret in enumerate(getattr(worker, name, ())):
            yield f"{name}[{number}]", secret


def _text_error(path: str, text: str) -> str | None:
    if path.startswith("api_key") and _HEADER_TEXT.fullmatch(text) is None:
        return "must be printable ASCII without spaces: it is sent in a header"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    return None
