"""Commands that take groups of options: a Struct per group instead of dozens of parameters."""

import inspect
from collections.abc import Callable
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter whose type is a Struct replaced by the fields of that Struct, for Typer to read.

    A field is an option: its annotation and its default are those of a parameter.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, Struct)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def run(**values: Any) -> None:
        given = {
            name: kind(**{field: values.pop(field) for field in kind.__struct_fields__})
            for name, kind in groups.items()
        }
        command(**values, **given)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _options(group: type[Struct]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.required else field.default,
            annotation=hints[field.name],
        )
        for field in msgspec.structs.fields(group)
    ]
