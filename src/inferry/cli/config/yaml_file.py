"""YAML loading in which a duplicate key is an error instead of an override."""

from collections.abc import Hashable
from typing import Any

import yaml


class DuplicateKey(yaml.YAMLError):
    """A mapping has a key twice; the message names the key and both lines."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        # Before merge keys (`<<`) are resolved: overriding a merged key is what merging is for.
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                name = (key.tag, key.value)
                if name in first:
                    raise DuplicateKey(f"key `{key.value}` in line {line} was set before, in line {first[name]}")
                first[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Load one document. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a safe loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # impossible dates and numbers
        raise yaml.YAMLError(str(error)) from None


def one_line_error(error: yaml.YAMLError) -> str:
    """The error in one line, with its place. The text of the document is not repeated: it may be a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        parts = [error.problem or "", error.context or "", error.note or ""]
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {_one_line(', '.join(filter(None, parts)))}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason}, at character {error.position + 1}"
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return " ".join(text.split())
