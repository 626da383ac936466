"""Pipelines of the configuration, served by the app."""

from pathlib import Path

from inferry.cli.config.pipelines import checked_pipelines
from inferry.cli.config.schema import Config, ConfigError
from inferry.dispatch.gateway import Gateway
from inferry.pipelines.deadlines import StageDurations
from inferry.pipelines.executor import ServedPipeline
from inferry.pipelines.graph import PipelineError
from inferry.pipelines.model import PipelineModel
from inferry.pipelines.resources import load_resources


def make_pipelines(config: Config, gateway: Gateway) -> dict[str, PipelineModel]:
    """The pipelines by name. Raises ConfigError."""
    limits = {lane: policy.queue_limit for lane, policy in config.lane_policies().items()}
    found = {}
    try:
        for checked in checked_pipelines(config.pipelines):
            served = ServedPipeline(checked, load_resources(checked.graph, Path()), StageDurations())
            found[checked.name] = PipelineModel(served, gateway, limits)
    except PipelineError as error:
        raise ConfigError(str(error)) from None
    return found
