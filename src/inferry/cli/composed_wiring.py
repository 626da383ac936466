"""Makes the composed models of a configuration."""

import random

from inferry.cli.config.schema import Config
from inferry.cli.pipeline_wiring import make_pipelines
from inferry.dispatch.gateway import Gateway
from inferry.ingress.app import App
from inferry.ingress.pipelines import PipelinesRouter
from inferry.pipelines.cascades import Cascade
from inferry.pipelines.composed import ComposedModel
from inferry.pipelines.ensembles import Ensemble
from inferry.pipelines.routes import Route


def compose(config: Config, app: App, gateway: Gateway) -> None:
    """Serve the routes, cascades, ensembles and pipelines of the configuration."""
    draw = random.SystemRandom().random
    models: dict[str, ComposedModel] = {name: Route(one) for name, one in config.routes.items()}
    models |= {name: Cascade(one, draw) for name, one in config.cascades.items()}
    models |= {name: Ensemble(one) for name, one in config.ensembles.items()}
    pipelines = make_pipelines(config, gateway)
    models |= {name: one for name, one in pipelines.items() if one.is_chat_model}
    calls = app.use_composed(models)
    app.mount(lambda refuse, fail: PipelinesRouter(refuse, fail, pipelines, calls))
