"""Pipelines declared in Python: the same `Pipeline` that YAML declares.

```python
declare = PipelineBuilder()
question = declare.text("question")
query = declare.embed("query", model="e5", input=question)
best = declare.rank("best", query=query, file="documents.jsonl", top=3)
context = declare.join("context", best.text, separator="\\n")
declare.generate("answer", model="llama", messages=[Message(content=f"{context}\\n\\n{question}")])
pipeline = declare.build(chat_input=question)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from msgspec import UNSET

from inferry.pipelines.declaration import (
    EmbedStage,
    FunctionStage,
    GenerateStage,
    JoinStage,
    MapStage,
    Message,
    Pipeline,
    PipelineInput,
    RankStage,
    Stage,
)
from inferry.pipelines.graph import INPUT

T = TypeVar("T")


class Vector:
    """The type of references to vectors."""


class Ranked:
    """The type of references to results of rank stages."""


class Ref(Generic[T]):
    """A reference to a value of this type. In a text it stands for the value."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __str__(self) -> str:
        return f"{{{{ {self.path} }}}}"

    @property
    def text(self: "Ref[list[Ranked]]") -> "Ref[list[str]]":
        """The documents of a ranking."""
        return Ref(f"{self.path}.text")

    def at(self, path: str) -> "Ref[Any]":
        """A field, or an element by its index."""
        return Ref(f"{self.path}.{path}")


Text = str | Ref[str] | Ref[Any]


class _Stages:
    """Stages in the order of their declaration."""

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}

    def _add(self, name: str, stage: Stage) -> "Ref[Any]":
        if name in self._stages:
            raise ValueError(f"there is a stage `{name}` already")
        self._stages[name] = stage
        return Ref(name)

    @overload
    def embed(self, name: str, *, model: str, input: Ref[list[str]], **options: Any) -> Ref[list[Vector]]: ...

    @overload
    def embed(self, name: str, *, model: str, input: str | Ref[str], **options: Any) -> Ref[Vector]: ...

    def embed(self, name: str, *, model: str, input: str | Ref[Any], **options: Any) -> Ref[Any]:
        return self._add(name, EmbedStage(model=model, input=str(input), options=options))

    def rank(
        self,
        name: str,
        *,
        query: Text | Ref[Vector],
        model: str | None = None,
        documents: Ref[list[str]] | None = None,
        vectors: Ref[list[Vector]] | None = None,
        file: str | None = None,
        top: int | None = None,
        **options: Any,
    ) -> Ref[list[Ranked]]:
        return self._add(
            name,
            RankStage(
                model=model,
                query=str(query),
                documents=None if documents is None else str(documents),
                vectors=None if vectors is None else str(vectors),
                file=file,
                top=top,
                options=options,
            ),
        )

    def generate(
        self,
        name: str,
        *,
        model: str,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> Ref[str]:
        given = tuple(messages)
        return self._add(
            name,
            GenerateStage(model=model, messages=given, max_tokens=max_tokens, temperature=temperature, options=options),
        )

    @overload
    def join(self, name: str, items: Ref[list[str]] | Sequence[Text], separator: str) -> Ref[str]: ...

    @overload
    def join(self, name: str, items: Ref[list[T]] | Sequence[Ref[T]], separator: None = None) -> Ref[list[T]]: ...

    def join(self, name: str, items: Any, separator: str | None = None) -> Ref[Any]:
        given = str(items) if isinstance(items, Ref) else tuple(map(str, items))
        return self._add(name, JoinStage(items=given, separator=separator))

    def function(
        self, name: str, function: str, arguments: Mapping[str, Text | Ref[Any]], *, returns: str = "any"
    ) -> Ref[Any]:
        given = {key: str(value) for key, value in arguments.items()}
        return self._add(name, FunctionStage(function=function, arguments=given, returns=returns))

    def map(self, name: str, over: Ref[list[T]], *, item: str = "item") -> "MapBuilder[T]":
        """The stages of a map are declared on what this returns, as `with declare.map(…) as each`."""
        return MapBuilder(self, name, over, item)


class MapBuilder(_Stages, Generic[T]):
    """Declares the inner stages of a map. `item` is an element of the list; `results` those of the last stage."""

    def __init__(self, outer: _Stages, name: str, over: Ref[list[T]], item: str) -> None:
        super().__init__()
        self._outer = outer
        self._name = name
        self._over = over
        self.item: Ref[T] = Ref(item)
        self.results: Ref[list[Any]] = Ref(name)

    def __enter__(self) -> "MapBuilder[T]":
        return self

    def __exit__(self, *problem: object) -> Literal[False]:
        if problem[0] is None:
            stage = MapStage(over=str(self._over), item=self.item.path, stages=self._stages)
            self._outer._add(self._name, stage)
        return False


class PipelineBuilder(_Stages):
    """Declares a pipeline. A mistake is found when the configuration is checked, as for YAML."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: dict[str, PipelineInput] = {}

    def text(self, name: str, *, default: Any = UNSET) -> Ref[str]:
        return self.input(name, "text", default=default)

    def texts(self, name: str, *, default: Any = UNSET) -> Ref[list[str]]:
        return self.input(name, "list[text]", default=default)

    def input(self, name: str, type: str, *, default: Any = UNSET) -> Ref[Any]:
        """An input of any type, written as in YAML."""
        self._inputs[name] = PipelineInput(type=type, default=default)
        return Ref(f"{INPUT}.{name}")

    def build(
        self,
        *,
        output: Ref[Any] | None = None,
        chat_input: Ref[str] | None = None,
        deadline_ms: int | None = None,
    ) -> Pipeline:
        return Pipeline(
            inputs=self._inputs,
            stages=self._stages,
            output=None if output is None else output.path,
            chat_input=None if chat_input is None else chat_input.path.removeprefix(f"{INPUT}."),
            deadline_ms=deadline_ms,
        )
