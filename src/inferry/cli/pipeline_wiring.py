"""Makes the pipelines of a configuration."""

from collections.abc import Mapping
from pathlib import Path

from inferry.cli.config.pipelines import PipelineConfig, checked_pipelines
from inferry.cli.config.schema import ConfigError
from inferry.dispatch.gateway import Gateway
from inferry.domain.lanes import Lane, LanePolicy
from inferry.pipelines.batch_sizes import MapLoad
from inferry.pipelines.deadlines import StageDurations
from inferry.pipelines.executor import ServedPipeline
from inferry.pipelines.graph import PipelineError
from inferry.pipelines.model import PipelineModel
from inferry.pipelines.resources import load_resources


def make_pipeline(
    name: str,
    config: PipelineConfig,
    gateway: Gateway,
    lanes: Mapping[Lane, LanePolicy],
    loads: Mapping[Lane, MapLoad],
) -> PipelineModel:
    """Raises ConfigError."""
    try:
        (checked,) = checked_pipelines({name: config})
        served = ServedPipeline(checked, load_resources(checked.graph, Path()), StageDurations())
    except PipelineError as error:
        raise ConfigError(str(error)) from None
    return PipelineModel(served, gateway, lanes, loads)
