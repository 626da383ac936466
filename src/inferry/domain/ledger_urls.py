"""Addresses of ledgers: what may be one, and which of them are files."""

IN_MEMORY = "sqlite:///:memory:"
"""The one way to say that nothing is to be kept."""


def ledger_url_error(url: str) -> str | None:
    """Why nothing can be kept there; None for a file, and for a database in memory that says so."""
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
    "names no file, and everything in it would be lost with the process; write sqlite:///inferry.db or "
    "sqlite:////var/lib/inferry/inferry.db (sqlite:///:memory: keeps nothing, on purpose)"
)

IN_MEMORY_MESSAGE = (
    "the ledger sqlite:///:memory: is in the memory of one gateway, and no other process can read or change it; set "
    "`ledger: sqlite:///inferry.db` (or another file) in the gateway's configuration"
)
"""What a command says that was asked to work on a ledger in memory."""
