"""The result file of a load test: options, figures, and every call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from inferry.loadgen.costs import CostFigures, Price, compute_costs
from inferry.loadgen.figures import GeneratorFigures, InterTokenLatencies, LaneFigures
from inferry.loadgen.rows import CallRow, RunRow
from inferry.sim.costs import EngineModel
from inferry.sim.workload import SloTarget

FORMAT = "inferry-bench/1"
_ROWS = ("calls", "runs")


class InvalidResult(Exception):
    """The file is not a result of `inferry bench`; the message says why."""


class Result(Struct, frozen=True, kw_only=True):
    """One load test. `shortened`: calls whose prompt was cut to fit the model's context.

    `partial`: it was stopped before its end. `cached_tokens`: whether cached tokens were reported by the server or
    assumed. `settings` are the parsed options.
    """

    format: str = FORMAT
    label: str
    workload: str
    command: str
    at: str
    partial: bool
    url: str
    server: str | None
    model: str
    versions: dict[str, str | None]
    settings: dict[str, Any]
    slo_targets: dict[str, SloTarget]
    price: Price
    engine_model: str | None
    seconds: float
    """When the last run began."""
    warmup_s: float
    wall_s: float
    shortened: int
    cached_tokens: str
    generator: GeneratorFigures
    cost_figures: CostFigures
    lanes: dict[str, LaneFigures]
    failures: dict[str, str]
    """The server's first message, by kind of failure."""
    itls: dict[str, InterTokenLatencies]
    tokens_by_second: dict[str, list[float]]
    runs: tuple[RunRow, ...]
    calls: tuple[CallRow, ...]

    @property
    def failed(self) -> int:
        return sum(lane.failed for lane in self.lanes.values())

    @property
    def done(self) -> int:
        return sum(lane.done for lane in self.lanes.values())


def to_json(result: Result) -> bytes:
    """One field or row per line, for readable diffs."""
    lines = []
    for field in fields(Result):
        value = getattr(result, field.name)
        if field.name in _ROWS:
            encoded = b"[\n" + b",\n".join(map(msgspec.json.encode, value)) + b"\n]"
        else:
            encoded = msgspec.json.encode(value)
        lines.append(b'"%b": %b' % (field.name.encode(), encoded))
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def from_json(data: bytes) -> Result:
    try:
        kind = msgspec.json.decode(data, type=_Kind).format
        if kind != FORMAT:
            raise InvalidResult(f"its format is {kind or 'not given'}, expected {FORMAT}")
        return msgspec.json.decode(data, type=Result)
    except msgspec.MsgspecError as error:
        raise InvalidResult(str(error)) from None


class _Kind(Struct):
    format: str = ""


def read_results(paths: Sequence[Path]) -> list[Result]:
    """Results to compare, with distinct labels. Raises InvalidResult and OSError."""
    results = []
    for path in paths:
        try:
            result = from_json(path.read_bytes())
        except InvalidResult as error:
            raise InvalidResult(f"{path} is no result of `inferry bench`: {error}") from None
        results.append(result if result.label else msgspec.structs.replace(result, label=path.stem))
    labels = [one.label for one in results]
    return [
        one if labels.count(one.label) == 1 else msgspec.structs.replace(one, label=f"{one.label} ({path.name})")
        for one, path in zip(results, paths, strict=True)
    ]


def priced(result: Result, price: Price, model: EngineModel | None) -> Result:
    """The same result with other prices or another engine model; options that are not given stay."""
    old = result.price
    merged = Price(
        gpu_per_hour=old.gpu_per_hour if price.gpu_per_hour is None else price.gpu_per_hour,
        gpus=max(old.gpus, price.gpus),
        run_budget=old.run_budget if price.run_budget is None else price.run_budget,
    )
    if merged == old and model is None:
        return result
    if model is None and result.engine_model is not None:
        raise InvalidResult("name the engine model with --model-costs, too: it says what part of the bill a run pays")
    cost_figures = compute_costs(result.calls, result.runs, result.warmup_s, merged, model)
    return msgspec.structs.replace(
        result,
        price=merged,
        cost_figures=cost_figures,
        engine_model=result.engine_model if model is None else model.name,
    )
