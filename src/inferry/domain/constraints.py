"""What the output of a call must match: a JSON schema, a regular expression, one of some texts, a grammar, tools."""

from msgspec import Struct


class ToolSpec(Struct, frozen=True, array_like=True, gc=False):
    """A tool that may be called. `schema` is the JSON schema of its arguments. User data, never printed.

    `is_strict`: keywords of the schema that cannot be enforced are refused; else they are ignored.
    """

    name: str
    schema: str
    is_strict: bool = False

    def __repr__(self) -> str:
        return f"ToolSpec({len(self.schema)} characters)"


class Constraint(Struct, frozen=True, array_like=True, gc=False):
    """At most one of `schema`, `regex`, `choices` and `lark` says what the text must match. User data, never printed.

    `param` is the request's field, for errors. With `tools` the output may be calls of them instead, and `must_call`
    allows nothing else; `is_parallel`: several calls in one answer.
    """

    param: str
    schema: str | None = None
    is_strict: bool = False
    regex: str | None = None
    choices: tuple[str, ...] = ()
    lark: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    must_call: bool = False
    is_parallel: bool = True

    def __repr__(self) -> str:
        return f"Constraint({self.param})"
