"""Values of a YAML document to typed ones.

An unknown key or an invalid value is an error that names its path and the closest known key, or the values allowed.
"""

import difflib
import enum
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from inferry.cli.config.checks import check_values
from inferry.cli.config.schema import Config, ConfigError

_STEP = re.compile(r"\[\d+\]|[^.\[\]]+")


def convert_config(raw: dict[str, Any]) -> Config:
    """A configuration, or some of its sections with the defaults of the others. Raises ConfigError."""
    _refuse_unknown_keys(raw, Config, "")
    _restore_off_words(raw)
    problems = list(check_values(raw))
    if problems:
        raise ConfigError("; ".join(problems))
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(invalid_value(_locate_error(raw, str(error)), raw, Config)) from None


def invalid_value(message: str, raw: Any, kind: Any) -> str:
    """msgspec's `Expected `int`, got `str` - at `$.server.port`` with the path first. Where only some values are valid,
    they are listed.
    """
    what, _, where = message.partition(" - at ")
    path = where.strip("`").removeprefix("$").removeprefix(".")
    valid = list(_valid_values(kind, raw, _STEP.findall(path))) if what.startswith("Invalid ") else []
    text = f"{what}; valid: {', '.join(valid)}" if valid else what
    return f"{path}: {text}" if path else text


def _valid_values(kind: Any, raw: Any, path: list[str]) -> Iterator[str]:
    """The values of the type that a path leads to, where they can be listed."""
    for option in _options(kind):
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if not path:
            if origin is typing.Literal:
                yield from map(str, arguments)
            elif isinstance(option, type) and issubclass(option, enum.Enum):
                yield from (str(one.value) for one in option)
            continue
        step, below = path[0], path[1:]
        if step.startswith("[") and origin in (list, tuple, set, frozenset):
            yield from _valid_values(arguments[0], _at(raw, int(step[1:-1])), below)
        elif origin is dict:
            yield from _valid_values(arguments[1], _at(raw, step), below)
        elif isinstance(option, type) and issubclass(option, Struct):
            config = option.__struct_config__
            if step == config.tag_field:
                yield str(config.tag)
            elif config.tag is None or not isinstance(raw, dict) or raw.get(config.tag_field) == config.tag:
                fields = typing.get_type_hints(option)
                yield from _valid_values(fields.get(step), _at(raw, step), below)


def _at(raw: Any, place: int | str) -> Any:
    try:
        return raw[place]
    except (LookupError, TypeError):
        return None


def _options(kind: Any) -> tuple[Any, ...]:
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else (kind,)


def _restore_off_words(raw: dict[str, Any]) -> None:
    """YAML reads a bare `off` as false and `on` as true; `window` and `auth.mode` use them as modes."""
    auth = raw.get("auth")
    if isinstance(auth, dict) and isinstance(auth.get("mode"), bool):
        raw["auth"] = {**auth, "mode": "on" if auth["mode"] else "off"}
    lanes = raw.get("lanes")
    for lane in lanes.values() if isinstance(lanes, dict) else ():
        if isinstance(lane, dict) and lane.get("window") is False:
            lane["window"] = "off"


def _refuse_unknown_keys(raw: Any, kind: Any, path: str) -> None:
    """Runs before msgspec checks types, so that the message can suggest the closest key."""
    if isinstance(raw, list | tuple):
        (inner, *_) = typing.get_args(kind) or (None,)
        for index, item in enumerate(raw):
            _refuse_unknown_keys(item, inner, f"{path}[{index}]")
        return
    if typing.get_origin(kind) is dict and isinstance(raw, dict):
        for key, value in raw.items():
            _refuse_unknown_keys(value, typing.get_args(kind)[1], f"{path}.{key}")
        return
    struct = _struct_for(kind, raw)
    if struct is None or not isinstance(raw, dict):
        return
    fields = typing.get_type_hints(struct)
    tag_field = struct.__struct_config__.tag_field
    known = [*struct.__struct_fields__, *([tag_field] if tag_field else [])]
    for key, value in raw.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known keys are {', '.join(known)}"
            raise ConfigError(f"unknown key `{where}`{hint}")
        if key != tag_field:
            _refuse_unknown_keys(value, fields[key], where)


def _struct_for(kind: Any, raw: Any) -> type[Struct] | None:
    """The Struct of a value: for a tagged union, the one named by its tag."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    structs = [one for one in options if isinstance(one, type) and issubclass(one, Struct)]
    if len(structs) > 1 and isinstance(raw, dict):
        tag_field = structs[0].__struct_config__.tag_field
        structs = [one for one in structs if one.__struct_config__.tag == raw.get(tag_field)]
    return structs[0] if structs else None


def _locate_error(raw: dict[str, Any], message: str) -> str:
    """Resolve the `[...]` of msgspec's `$.tenants[...]` by converting each entry alone."""
    section = message.partition("`$.")[2].partition("[...]")[0]
    entries = raw.get(section) if "[...]" in message else None
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            msgspec.convert({section: {key: entry}}, Config)
        except msgspec.ValidationError as error:
            return str(error).replace("[...]", f".{key}", 1)
    return message
