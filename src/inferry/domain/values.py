"""Immutable values of the hot path: ordinary classes, so that mypyc makes their fields native.

A msgspec Struct is a C type that compiled code reads through the interpreter's attribute lookup, and a call reads
hundreds of fields. Fields are declared Final: written once, in `__init__`.
"""

from typing import Any, TypeVar

import msgspec

AnyValue = TypeVar("AnyValue")


class Value:
    """Equal to a value of the same class with equal fields."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and fields_of(self) == fields_of(other)

    def __hash__(self) -> int:
        return hash(tuple(fields_of(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields_of(self).items())})"


def fields_of(value: object) -> dict[str, Any]:
    names = getattr(type(value), "__mypyc_attrs__", None)  # compiled, an object has no __dict__
    return dict(vars(value)) if names is None else {name: getattr(value, name) for name in names}


def replace(value: AnyValue, **changes: Any) -> AnyValue:
    """A copy of a value or Struct with some fields replaced."""
    if isinstance(value, Value):
        return type(value)(**(fields_of(value) | changes))
    return msgspec.structs.replace(value, **changes)  # type: ignore[type-var]
