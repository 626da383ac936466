"""Checks that hold for every value of a configuration, and for addresses: sentences that name the path."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LARGEST = 2**63 - 1


def impossible_values(value: Any, path: str = "") -> Iterator[str]:
    """NaN, infinite and oversized numbers, and control characters in keys and texts, anywhere below `path`.

    Values are not repeated: one may be a secret.
    """
    if isinstance(value, Mapping):
        for key, below in value.items():
            name = str(key)
            if _CONTROL.search(name):
                yield f"{path or 'the configuration'}: a key has control characters ({name!r})"
            else:
                yield from impossible_values(below, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from impossible_values(below, f"{path}[{index}]")
    elif isinstance(value, str):
        if _CONTROL.search(value):
            yield f"{path} has control characters (line breaks among them)"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{path} must be a finite number"
    elif isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        yield f"{path} must be below 2^63"


def problem_of_url(url: str) -> str | None:
    """Why a worker cannot be reached at this URL; None where it can be tried."""
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        return "has spaces, control or non-ASCII characters"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "is not a URL: its host or port cannot be read"
    if parts.scheme not in ("http", "https"):
        has = f"has scheme `{parts.scheme}` and " if parts.scheme and parts.netloc else ""
        return f"{has}must be of the form http://HOST:PORT or https://HOST"
    if "@" in parts.netloc:
        return "has a user name or password in it; a server's key belongs in api_key"
    if not parts.hostname:
        return "has no host and must be of the form http://HOST:PORT or https://HOST"
    if port == 0:
        return "has port 0, which no server listens on"
    if parts.query or parts.fragment or "?" in url or "#" in url:
        return "has a query or a fragment and must be of the form http://HOST:PORT or https://HOST"
    return None


def problem_of_host(host: str) -> str | None:
    """Why nothing can listen there, as far as the name alone says."""
    if not host:
        return "is empty; 127.0.0.1 is this machine alone, 0.0.0.0 every address of it"
    try:
        host.encode("idna")
    except UnicodeError:
        return "is not the name or address of a host"
    if any(char <= " " or char in "/@[]" for char in host):
        return "is not the name or address of a host: no spaces, brackets, slashes or user names"
    return None
