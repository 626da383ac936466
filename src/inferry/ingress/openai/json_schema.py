"""Checks of a JSON schema before an engine compiles it: an error names the place in the schema."""

from typing import Any, Final

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.errors import printable

MAX_DEPTH: Final = 64
MAX_NODES: Final = 20_000
MAX_PATTERN_CHARS: Final = 2_000

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NOT_ENFORCED = frozenset(
    {
        "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "unevaluatedProperties",
        "unevaluatedItems", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems", "$dynamicRef",
    }
)  # fmt: skip
"""Keywords that no grammar expresses."""


class _Check:
    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._nodes = 0

    def schema(self, schema: object, path: str, depth: int) -> None:
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"`{path}` is nested more than {MAX_DEPTH} levels deep", param=path)
        if self._nodes > MAX_NODES:
            raise InvalidRequest(f"`{path}`: the schema has more than {MAX_NODES} parts", param=path)
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _wrong(path, "a JSON schema: an object or a boolean")
        self._keywords(schema, path)
        for name in _SCHEMAS:
            inner = schema.get(name)
            if isinstance(inner, list) and name == "items":  # as drafts before 2020 write `prefixItems`
                self._all(inner, f"{path}.{name}", depth)
            elif name in schema:
                self.schema(inner, f"{path}.{name}", depth + 1)
        for name in _LISTS:
            if name in schema:
                self._all(schema[name], f"{path}.{name}", depth)
        for name in _MAPS:
            if name in schema:
                self._map(schema[name], f"{path}.{name}", depth)

    def _all(self, schemas: object, path: str, depth: int) -> None:
        if not isinstance(schemas, list) or not schemas:
            raise _wrong(path, "a list of schemas")
        for index, one in enumerate(schemas):
            self.schema(one, f"{path}[{index}]", depth + 1)

    def _map(self, schemas: object, path: str, depth: int) -> None:
        if not isinstance(schemas, dict):
            raise _wrong(path, "an object of schemas")
        for name, one in schemas.items():
            self.schema(one, f"{path}.{printable(name)}", depth + 1)

    def _keywords(self, schema: dict[str, Any], path: str) -> None:
        kinds = schema.get("type", "object")
        listed = kinds if isinstance(kinds, list) and kinds else [kinds]
        if not all(isinstance(kind, str) and kind in _TYPES for kind in listed):
            raise _wrong(f"{path}.type", "a type of JSON, or a list of them")
        required, allowed = schema.get("required", []), schema.get("enum", [None])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _wrong(f"{path}.required", "a list of names")
        if not isinstance(allowed, list) or not allowed:
            raise _wrong(f"{path}.enum", "a list of values")
        self._nodes += len(allowed)
        pattern, reference = schema.get("pattern", ""), schema.get("$ref", "#")
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
            raise _wrong(f"{path}.pattern", f"text of at most {MAX_PATTERN_CHARS} characters")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _wrong(f"{path}.$ref", "a place in the same schema, `#/…`")
        for name in _NUMBERS:
            if name in schema and (isinstance(schema[name], bool) or not isinstance(schema[name], int | float)):
                raise _wrong(f"{path}.{name}", "a number")
        for name in _COUNTS:
            if name in schema and (type(schema[name]) is not int or schema[name] < 0):
                raise _wrong(f"{path}.{name}", "an integer from 0 on")
        if self._is_strict:
            for name in schema:
                if name in _NOT_ENFORCED:
                    raise UnsupportedFeature(f"`{path}.{name}` cannot be enforced", param=f"{path}.{name}")


def check_schema(schema: object, path: str, *, is_strict: bool) -> dict[str, Any]:
    """The schema, an object at `path` of the request. Raises InvalidRequest, and UnsupportedFeature where a strict
    schema has keywords that cannot be enforced.
    """
    if not isinstance(schema, dict):
        raise _wrong(path, "a JSON schema: an object")
    _Check(is_strict).schema(schema, path, 1)
    return schema


def _wrong(path: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}` must be {wanted}", param=path)
