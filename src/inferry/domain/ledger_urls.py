"""Validation of ledger URLs."""

IN_MEMORY = "sqlite:///:memory:"
"""URL of a ledger that is lost with the process."""


def ledger_url_error(url: str) -> str | None:
    """What is wrong with a ledger URL; None for a file and for `sqlite:///:memory:`."""
    scheme, separator, path = url.partition(":///")
    if scheme != "sqlite" or not separator:
        if url in ("sqlite:", "sqlite:/", "sqlite://"):
            return _NO_FILE_MESSAGE
        return "must be a URL of the form sqlite:///PATH"
    if not path:
        return _NO_FILE_MESSAGE
    if "?" in path or path.startswith("file:"):
        return "takes no parameters; it must be of the form sqlite:///PATH"
    if path.endswith("/"):
        return "names a directory; write sqlite:///PATH/inferry.db"
    return None


_NO_FILE_MESSAGE = (
    "names no file, so everything would be lost with the process; use sqlite:///inferry.db or "
    "sqlite:////var/lib/inferry/inferry.db (or sqlite:///:memory: to keep nothing)"
)

IN_MEMORY_MESSAGE = (
    "the ledger sqlite:///:memory: exists only inside the gateway process and cannot be read by a command; set "
    "`ledger: sqlite:///inferry.db` (or another file) in the gateway's configuration"
)
"""Error of a command that needs a ledger file."""
