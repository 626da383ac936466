"""Types of the values that flow between stages, as far as they can be checked before anything runs."""

import re
from array import array
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from inferry.domain.errors import InvalidRequest

_BASES = frozenset({"text", "number", "vector", "any"})
_LIST = re.compile(r"list\[(.+)\]")


class ValueType(Struct, frozen=True):
    """`base` within `depth` lists. A record has the types of its `fields`; `any` is checked when it is used."""

    base: str
    depth: int = 0
    fields: Mapping[str, "ValueType"] = {}

    def __str__(self) -> str:
        return "list[" * self.depth + self.base + "]" * self.depth

    def listed(self) -> "ValueType":
        """A list of these."""
        return ValueType(self.base, self.depth + 1, self.fields)

    def element(self) -> "ValueType | None":
        """An element of the list; None where this is no list."""
        if self.base == "any" and self.depth == 0:
            return self
        return ValueType(self.base, self.depth - 1, self.fields) if self.depth else None

    def accepts(self, other: "ValueType") -> bool:
        """Whether a value of the other type may be used where this one is expected."""
        if other.base == "any" or self.base == "any":
            return other.depth <= self.depth if other.base == "any" else self.depth <= other.depth
        return (self.base, self.depth) == (other.base, other.depth)

    def at(self, path: tuple[str, ...]) -> "ValueType | None":
        """The type below this one: fields by name, elements by index, a field of a list as the list of the fields."""
        found: ValueType | None = self
        for name in path:
            if found is None:
                return None
            if name.isdigit():
                found = found.element()
            elif found.base == "any":
                found = ANY
            else:
                field = found.fields.get(name)
                found = None if field is None else ValueType(field.base, field.depth + found.depth, field.fields)
        return found


TEXT = ValueType("text")
NUMBER = ValueType("number")
VECTOR = ValueType("vector")
ANY = ValueType("any")


def record(fields: Mapping[str, ValueType]) -> ValueType:
    return ValueType("record", 0, fields)


RANKED = record({"index": NUMBER, "score": NUMBER, "text": TEXT})
"""One result of a rank stage. `text` is the document, where the stage has documents."""


def parse_type(text: str) -> ValueType | None:
    """`text`, `number`, `vector`, `any`, or `list[…]` of one; None for anything else."""
    nested = _LIST.fullmatch(text)
    if nested is not None:
        inner = parse_type(nested[1])
        return None if inner is None else inner.listed()
    return ValueType(text) if text in _BASES else None


def read_value(value: Any, expected: ValueType, where: str) -> Any:
    """A JSON value as the type; vectors become arrays of float32. Raises InvalidRequest that quotes no value."""
    if expected.depth:
        if not isinstance(value, list):
            raise InvalidRequest(f"`{where}` must be {expected}", param=where)
        if expected.depth == 1 and _all_are(value, _CLASSES.get(expected.base)):
            return value  # without a name and a check for each item
        inner = ValueType(expected.base, expected.depth - 1)
        return [read_value(one, inner, f"{where}[{index}]") for index, one in enumerate(value)]
    if expected.base == "vector" and isinstance(value, list) and value:
        try:
            return array("f", value)
        except (TypeError, OverflowError):
            raise InvalidRequest(f"`{where}` must be a list of numbers", param=where) from None
    if expected.base == "any" or _is_scalar(value, expected.base):
        return value
    raise InvalidRequest(f"`{where}` must be {expected}", param=where)


_CLASSES: dict[str, type] = {"text": str, "vector": array}


def _all_are(values: list[Any], kind: type | None) -> bool:
    return kind is not None and set(map(type, values)) <= {kind}


def _is_scalar(value: Any, base: str) -> bool:
    if base == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str if base == "text" else array)
