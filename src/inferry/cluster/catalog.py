"""The owner's workers as ingress processes see them."""

from inferry.cluster.frames import Catalog, ServedModels
from inferry.dispatch.gateway import Gateway
from inferry.domain.workers import Phase, WorkerView


def catalog_of(gateway: Gateway) -> Catalog:
    """The models by isolation and precision, which together decide what jobs a worker may take."""
    groups: dict[tuple[str | None, str | None], list[WorkerView]] = {}
    for view in gateway.views():
        if not view.is_remote:
            groups.setdefault((view.isolation, view.precision), []).append(view)
    served: list[ServedModels] = []
    for isolation, precision in sorted(groups, key=repr):
        views = groups[isolation, precision]
        models = frozenset(model for view in views for model in view.models)
        cards = gateway.models.cards(isolation)
        served.append(
            ServedModels(
                isolation,
                precision,
                any(view.phase is Phase.READY for view in views),
                models,
                frozenset(model for view in views for model in view.adapters),
                tuple(cards[model] for model in sorted(models) if model in cards),
            )
        )
    return Catalog(tuple(served))
