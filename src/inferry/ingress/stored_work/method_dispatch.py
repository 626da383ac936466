"""Requests to a collection and its objects: which operation a path and a method name."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import unquote

from inferry.domain.errors import NotFound
from inferry.ingress.admin_tenants import WrongMethod

Operation = Callable[[str], Coroutine[Any, Any, Any]]
"""Begins the operation on the object with the id; the id of the collection itself is empty."""
Operations = Mapping[str, Mapping[str, Operation]]
"""By path below the prefix (empty for the collection, `{id}`, `{id}/cancel`), then by method."""


def begin(prefix: str, path: str, method: bytes, operations: Operations) -> Coroutine[Any, Any, Any]:
    """The operation's work. HEAD is GET. Raises NotFound, WrongMethod."""
    id, _, rest = path.removeprefix(prefix).removeprefix("/").partition("/")
    id = unquote(id)
    below = "" if not id else f"{{id}}/{rest}" if rest else "{id}"
    methods = operations.get(below)
    if methods is None:
        raise NotFound("unknown path")
    operation = methods.get("GET" if method == b"HEAD" else method.decode("latin-1"))
    if operation is None:
        allowed = ", ".join("GET, HEAD" if name == "GET" else name for name in methods)
        raise WrongMethod(f"{prefix}/{below}".rstrip("/"), allowed)
    return operation(id)
