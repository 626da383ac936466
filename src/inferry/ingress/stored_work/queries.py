"""Query parameters of listings."""

from urllib.parse import parse_qsl

from inferry.domain.errors import InvalidRequest


def parse_query(text: str, *names: str) -> dict[str, str]:
    """The parameters given. Raises InvalidRequest for others."""
    given = dict(parse_qsl(text, keep_blank_values=True))
    for name in given:
        if name not in names:
            known = f"supported are {', '.join(names)}" if names else "this path has none"
            raise InvalidRequest(f"unknown query parameter; {known}")
    return given


def limit_of(query: dict[str, str], default: int, maximum: int) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or not 1 <= int(text) <= maximum:
        raise InvalidRequest(f"`limit` must be between 1 and {maximum}", param="limit")
    return int(text)


def is_newest_first(query: dict[str, str]) -> bool:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("`order` must be asc or desc", param="order")
    return order == "desc"
