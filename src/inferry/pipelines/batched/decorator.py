"""`@inferry.batched` and what it returns for functions and methods."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Self, TypeVar, cast, overload

from inferry.pipelines.batched.batch_queue import Window
from inferry.pipelines.batched.functions import AsyncBatched, SyncBatched
from inferry.pipelines.batched.options import LaneName, Options
from inferry.pipelines.batched.outcomes import OnError

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")


class SyncBatchedMethod(Generic[S, T, R]):
    """A batched method. Each instance has batches of its own, from its first call on."""

    def __init__(self, function: Callable[[S, list[T]], Sequence[R | Exception]], options: Options) -> None:
        self._function = function
        self._options = options
        functools.update_wrapper(cast(Callable[..., Any], self), function)

    @overload
    def __get__(self, instance: None, owner: type[S]) -> Self: ...
    @overload
    def __get__(self, instance: S, owner: type[S] | None = None) -> SyncBatched[T, R]: ...
    def __get__(self, instance: S | None, owner: type[S] | None = None) -> "SyncBatched[T, R] | Self":
        if instance is None:
            return self
        function = functools.partial(self._function, instance)
        name = self._function.__qualname__
        bound: SyncBatched[T, R] = SyncBatched(function, name, self._options)
        found: SyncBatched[T, R] = _attributes(instance, name).setdefault(self._function.__name__, bound)
        return found


class AsyncBatchedMethod(Generic[S, T, R]):
    """As `SyncBatchedMethod`, of an asynchronous method."""

    def __init__(self, function: Callable[[S, list[T]], Awaitable[Sequence[R | Exception]]], options: Options) -> None:
        self._function = function
        self._options = options
        functools.update_wrapper(cast(Callable[..., Any], self), function)

    @overload
    def __get__(self, instance: None, owner: type[S]) -> Self: ...
    @overload
    def __get__(self, instance: S, owner: type[S] | None = None) -> AsyncBatched[T, R]: ...
    def __get__(self, instance: S | None, owner: type[S] | None = None) -> "AsyncBatched[T, R] | Self":
        if instance is None:
            return self
        function = functools.partial(self._function, instance)
        name = self._function.__qualname__
        bound: AsyncBatched[T, R] = AsyncBatched(function, name, self._options)
        found: AsyncBatched[T, R] = _attributes(instance, name).setdefault(self._function.__name__, bound)
        return found


def _attributes(instance: object, method: str) -> dict[str, Any]:
    """Where an instance has its batches: its own attribute is found before the descriptor, which has no `__set__`."""
    try:
        return vars(instance)
    except TypeError:
        # Weak references are no way out: the batches refer to their instance.
        raise TypeError(f"{method} is batched per instance: add '__dict__' to the __slots__ of its class") from None


class BatchedDecorator:
    """`@batched(...)` with its options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @overload
    def __call__(self, function: Callable[[list[T]], Awaitable[Sequence[R | Exception]]], /) -> AsyncBatched[T, R]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], Sequence[R | Exception]], /) -> SyncBatched[T, R]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[T]], Awaitable[Sequence[R | Exception]]], /
    ) -> AsyncBatchedMethod[S, T, R]: ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Sequence[R | Exception]], /) -> SyncBatchedMethod[S, T, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        if _positional_parameters(function) == 2:
            return (AsyncBatchedMethod if is_async else SyncBatchedMethod)(function, self._options)
        name = getattr(function, "__qualname__", None) or type(function).__name__
        return (AsyncBatched if is_async else SyncBatched)(function, name, self._options)


@overload
def batched(function: Callable[[list[T]], Awaitable[Sequence[R | Exception]]], /) -> AsyncBatched[T, R]: ...
@overload
def batched(function: Callable[[list[T]], Sequence[R | Exception]], /) -> SyncBatched[T, R]: ...
@overload
def batched(function: Callable[[S, list[T]], Awaitable[Sequence[R | Exception]]], /) -> AsyncBatchedMethod[S, T, R]: ...
@overload
def batched(function: Callable[[S, list[T]], Sequence[R | Exception]], /) -> SyncBatchedMethod[S, T, R]: ...
@overload
def batched(
    *,
    max_batch: int = 64,
    window: Window = "adaptive",
    window_ms: float = 5.0,
    max_queue: int | None = 10_000,
    concurrency: int = 1,
    lane: LaneName = "P1",
    on_error: OnError = "bisect",
) -> BatchedDecorator: ...
def batched(
    function: Callable[..., Any] | None = None,
    /,
    *,
    max_batch: int = 64,
    window: Window = "adaptive",
    window_ms: float = 5.0,
    max_queue: int | None = 10_000,
    concurrency: int = 1,
    lane: LaneName = "P1",
    on_error: OnError = "bisect",
) -> Any:
    """Make a function of a list callable with single items, and call it with batches of them.

    The function, or method, takes a list of items and returns a list with one result per item. A result that is an
    Exception is raised for its item only.

    - `max_batch`: most items of one call of the function.
    - `window`, `window_ms`: whether and how long an item is held for others while the function is idle. `adaptive`
      holds only where others were seen to follow, `fixed` always, `off` never.
    - `max_queue`: most items that wait; a further one is refused with `QueueFull`. None: no limit.
    - `concurrency`: calls of the function at a time.
    - `lane`: the lane of calls that name none. P0 goes before P1, and P1 before P2; lower lanes keep a small share.
    - `on_error`: what happens when the function raises. `bisect` calls it again with halves of the batch, so that the
      error belongs to the item that causes it. `fail` raises it for every item of the batch, for functions that must
      not be called twice with an item.
    """
    options = Options(max_batch, window, window_ms, max_queue, concurrency, lane, on_error)
    options.check()
    decorator = BatchedDecorator(options)
    return decorator if function is None else decorator(function)


def _positional_parameters(function: Callable[..., Any]) -> int:
    """The parameters that a call must give by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)
    if required not in (1, 2):
        raise TypeError(f"a batched function takes one list; {function!r} requires {required} positional arguments")
    return required
