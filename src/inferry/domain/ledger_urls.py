"""Ledger URLs: validation, and the form that is shown."""

from urllib.parse import urlsplit

IN_MEMORY = "sqlite:///:memory:"
"""URL of a ledger that is lost with the process."""
_FORMS = "must be a URL of the form sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"


def is_postgresql(url: str) -> bool:
    return url.startswith("postgresql://")


def ledger_url_error(url: str) -> str | None:
    """What is wrong with a ledger URL; None for a PostgreSQL database, a file and `sqlite:///:memory:`.

    The message never repeats the URL, which may contain a password.
    """
    if is_postgresql(url):
        return _postgresql_url_error(url)
    scheme, separator, path = url.partition(":///")
    if scheme != "sqlite" or not separator:
        if url in ("sqlite:", "sqlite:/", "sqlite://"):
            return _NO_FILE_MESSAGE
        return _FORMS
    if not path:
        return _NO_FILE_MESSAGE
    if "?" in path or path.startswith("file:"):
        return "takes no parameters; it must be of the form sqlite:///PATH"
    if path.endswith("/"):
        return "names a directory; write sqlite:///PATH/inferry.db"
    return None


def shown_ledger_url(url: str) -> str:
    """The URL without its password and parameters, for logs and messages."""
    if not is_postgresql(url):
        return url
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    return f"postgresql://{user.partition(':')[0]}{at}{host}{parts.path}"


def _postgresql_url_error(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is not a valid URL: special characters in the password must be percent-encoded"
    if not parts.path.strip("/"):
        return "names no database: postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
    if "/" in parts.path[1:] or "@" in parts.path:
        return "is not a valid URL: special characters in the password must be percent-encoded"
    return None


_NO_FILE_MESSAGE = (
    "names no file, so everything would be lost with the process; use sqlite:///inferry.db or "
    "sqlite:////var/lib/inferry/inferry.db (or sqlite:///:memory: to keep nothing)"
)

IN_MEMORY_MESSAGE = (
    "the ledger sqlite:///:memory: exists only inside the gateway process and cannot be read by a command; set "
    "`ledger: sqlite:///inferry.db` (or another file) in the gateway's configuration"
)
"""Error of a command that needs a ledger that other processes can open."""
