"""Templates: text with `{{ name.path }}`. Substitution only; nothing is executed, and values are not parsed again."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from inferry.domain.errors import InvalidRequest

_REFERENCE = re.compile(r"\{\{\s*([A-Za-z_]\w*(?:\.\w+)*)\s*\}\}", re.ASCII)


class TemplateError(ValueError):
    """The template is malformed."""


class Reference(Struct, frozen=True):
    """A name, and the path below its value."""

    name: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.name, *self.path))


class Template(Struct, frozen=True):
    """Texts and references, in order."""

    parts: tuple[str | Reference, ...]

    @property
    def references(self) -> tuple[Reference, ...]:
        return tuple(part for part in self.parts if isinstance(part, Reference))

    @property
    def only(self) -> Reference | None:
        """The reference that is the whole template, whose value is used as it is; None for text."""
        first = self.parts[0] if len(self.parts) == 1 else None
        return first if isinstance(first, Reference) else None


def parse_template(text: str) -> Template:
    """Raises TemplateError for `{{` or `}}` outside a reference."""
    parts: list[str | Reference] = []
    end = 0
    for found in _REFERENCE.finditer(text):
        parts.append(text[end : found.start()])
        name, *path = found[1].split(".")
        parts.append(Reference(name, tuple(path)))
        end = found.end()
    parts.append(text[end:])
    if any(isinstance(part, str) and ("{{" in part or "}}" in part) for part in parts):
        raise TemplateError("a reference must have the form {{ name.path }}")
    return Template(tuple(part for part in parts if part != ""))


def render(template: Template, scope: Mapping[str, Any]) -> Any:
    """The value of the template: text, or the value of its only reference. Raises InvalidRequest."""
    only = template.only
    if only is not None:
        return resolve(only, scope)
    return "".join(part if isinstance(part, str) else _as_text(part, scope) for part in template.parts)


def resolve(reference: Reference, scope: Mapping[str, Any]) -> Any:
    value = scope[reference.name]
    for name in reference.path:
        value = _below(value, name, reference)
    return value


def _below(value: Any, name: str, reference: Reference) -> Any:
    if isinstance(value, Mapping) and name in value:
        return value[name]
    if isinstance(value, list):
        if not name.isdigit():
            return [_below(one, name, reference) for one in value]
        if int(name) < len(value):
            return value[int(name)]
    raise InvalidRequest(f"`{reference}` does not exist: `{name}` is missing")


def _as_text(reference: Reference, scope: Mapping[str, Any]) -> str:
    value = resolve(reference, scope)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}" if isinstance(value, float) else str(value)
    raise InvalidRequest(f"`{reference}` is neither text nor a number, and cannot be part of a text")
