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
    drained = tuple(report.name for report in gateway.worker_reports() if report.drained and report.kind != "remote")
    lanes, tried = gateway.models.policies
    fingerprints = gateway.models.fingerprints(frozenset(model for one in served for model in one.models))
    # Copies, because the policies in use are updated in place.
    return Catalog(tuple(served), drained, *gateway.owner_state(), dict(lanes), dict(tried or {}), fingerprints)
