"""Makes the composed models of configurations, and serves them."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from inferry.cli.config.pipelines import PipelineConfig
from inferry.cli.config.schema import Config
from inferry.cli.pipeline_wiring import make_pipeline
from inferry.dispatch.gateway import Gateway
from inferry.domain.lanes import Lane, LanePolicy
from inferry.ingress.app import App
from inferry.ingress.pipelines import PipelinesRouter
from inferry.pipelines.batch_sizes import MapLoad
from inferry.pipelines.cascades import Cascade
from inferry.pipelines.composed import ComposedModel
from inferry.pipelines.ensembles import Ensemble
from inferry.pipelines.model import PipelineModel
from inferry.pipelines.routes import Route
from inferry.pipelines.versions import ComposedSet, ComposedVersions

Model = TypeVar("Model", bound=ComposedModel)
_Key = tuple[str, str, bytes]


class ComposedModels:
    """The composed models of a gateway. `versions` are in use; `make` makes others."""

    def __init__(self, gateway: Gateway, lanes: Mapping[Lane, LanePolicy]) -> None:
        self.versions = ComposedVersions()
        self._gateway = gateway
        self._lanes = lanes
        self._loads = {lane: MapLoad() for lane in Lane}
        self._made: dict[_Key, ComposedModel] = {}

    def make(self, configs: Sequence[Config]) -> list[ComposedSet]:
        """The composed models of each configuration. One with the settings of the last time is kept, with what it has
        learned. Blocks: files of documents are read. Raises ConfigError."""
        made: dict[_Key, ComposedModel] = {}
        sets = [self._make_set(config, made) for config in configs]
        self._made = made
        return sets

    def _make_set(self, config: Config, made: dict[_Key, ComposedModel]) -> ComposedSet:
        draw = random.SystemRandom().random

        def models(section: str, make: Callable[[str, Any], Model]) -> dict[str, Model]:
            found: dict[str, Any] = {}
            for name, settings in getattr(config, section).items():
                key = section, name, msgspec.json.encode(settings)
                found[name] = made[key] = made.get(key) or self._made.get(key) or make(name, settings)
            return found

        pipelines = models("pipelines", self._make_pipeline)
        return ComposedSet(
            models={
                **models("routes", lambda _, one: Route(one)),
                **models("cascades", lambda _, one: Cascade(one, draw)),
                **models("ensembles", lambda _, one: Ensemble(one)),
                **{name: one for name, one in pipelines.items() if one.is_chat_model},
            },
            pipelines=pipelines,
        )

    def _make_pipeline(self, name: str, settings: PipelineConfig) -> PipelineModel:
        return make_pipeline(name, settings, self._gateway, self._lanes, self._loads)


def compose(config: Config, app: App, gateway: Gateway, lanes: Mapping[Lane, LanePolicy]) -> ComposedModels:
    """Serve the routes, cascades, ensembles and pipelines of the configuration. `lanes` are those in use."""
    composed = ComposedModels(gateway, lanes)
    composed.versions.use(composed.make([config])[0])
    calls = app.use_composed(composed.versions)
    app.mount(lambda refuse, fail: PipelinesRouter(refuse, fail, composed.versions, calls))
    return composed
