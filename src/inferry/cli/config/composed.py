"""The `routes`, `cascades` and `ensembles` sections of the configuration: checks of names and of what they need."""

import re
from collections.abc import Iterator, Mapping, Sequence

from inferry.cli.config.workers import EmbeddedWorkerConfig, WorkerConfig
from inferry.pipelines.settings import CascadeConfig, EnsembleConfig, RouteConfig, VerifierConfig
from inferry.pipelines.verifiers import load_function

BUNDLED_MODEL = "inferry-triage"
_NAME = re.compile(r"[\x21-\x7e]{1,200}")
_LANES = ("P0", "P1", "P2")


def check_composed(
    routes: Mapping[str, RouteConfig],
    cascades: Mapping[str, CascadeConfig],
    ensembles: Mapping[str, EnsembleConfig],
    workers: Sequence[WorkerConfig],
    *,
    has_workers_file: bool,
) -> Iterator[str]:
    sections: dict[str, Mapping[str, object]] = {"routes": routes, "cascades": cascades, "ensembles": ensembles}
    places = [(f"{section}.{name}", name) for section, found in sections.items() for name in found]
    served = served_models(workers)
    names = [name for _, name in places]
    for where, name in places:
        if not _NAME.fullmatch(name) or ">" in name:
            yield f"{where}: a name has 1 to 200 printable ASCII characters, without spaces and `>`"
        if names.count(name) > 1:
            yield f"{where}: the name is used twice"
        if name in served:
            yield f"{where}: a worker serves a model or adapter of this name"
    calls = {name: dict(_calls(name, routes, cascades, ensembles)) for name in names}
    # Workers that name no models are asked for them at startup.
    is_complete = not has_workers_file and all(_models_of(worker) for worker in workers)
    for name in names:
        for where, model in calls[name].items():
            if is_complete and model not in served and model not in calls:
                yield f"{where}: no worker and no composed model has the name {model}"
        if name in _reachable(name, calls):
            yield f"{next(place for place, one in places if one == name)}: calls itself"
    for name, route in routes.items():
        yield from _check_route(f"routes.{name}", route)
    for name, cascade in cascades.items():
        yield from _check_cascade(f"cascades.{name}", cascade)
    for name, ensemble in ensembles.items():
        yield from _check_ensemble(f"ensembles.{name}", ensemble)


def reached_models(
    routes: Mapping[str, RouteConfig], cascades: Mapping[str, CascadeConfig], ensembles: Mapping[str, EnsembleConfig]
) -> dict[str, set[str]]:
    """By composed model, the models that it or a composed model that it calls may call."""
    calls = {name: dict(_calls(name, routes, cascades, ensembles)) for name in (*routes, *cascades, *ensembles)}
    return {
        name: {model for one in (name, *_reachable(name, calls)) for model in calls[one].values()} for name in calls
    }


def served_models(workers: Sequence[WorkerConfig]) -> set[str]:
    """Names of models and adapters that the configuration gives to workers."""
    return {name for worker in workers for name in (*_models_of(worker), *getattr(worker, "adapters", ()))}


def _models_of(worker: WorkerConfig) -> tuple[str, ...]:
    if isinstance(worker, EmbeddedWorkerConfig) and not worker.models:
        return (BUNDLED_MODEL if worker.model is None else worker.model.rstrip("/").rpartition("/")[2],)
    return worker.models


def _calls(
    name: str,
    routes: Mapping[str, RouteConfig],
    cascades: Mapping[str, CascadeConfig],
    ensembles: Mapping[str, EnsembleConfig],
) -> Iterator[tuple[str, str]]:
    """(key of the configuration, model) for all models that a composed model calls."""
    verifier: VerifierConfig | None = None
    where = ""
    if name in routes:
        route = routes[name]
        yield f"routes.{name}.default", route.default
        yield from ((f"routes.{name}.rules[{index}].model", rule.model) for index, rule in enumerate(route.rules))
        if route.classify is not None:
            yield f"routes.{name}.classify.model", route.classify.model
            yield from ((f"routes.{name}.classify.labels.{key}", one) for key, one in route.classify.labels.items())
    elif name in cascades:
        cascade, where = cascades[name], f"cascades.{name}.accept.verifier"
        yield f"cascades.{name}.small", cascade.small
        yield f"cascades.{name}.large", cascade.large
        verifier = cascade.accept.verifier
    else:
        where, verifier = f"ensembles.{name}.verifier", ensembles[name].verifier
        yield from ((f"ensembles.{name}.models[{index}]", one) for index, one in enumerate(ensembles[name].models))
    if verifier is not None and verifier.model is not None:
        yield f"{where}.model", verifier.model


def _reachable(name: str, calls: Mapping[str, Mapping[str, str]]) -> set[str]:
    found: set[str] = set()
    left = list(calls[name].values())
    while left:
        model = left.pop()
        if model in calls and model not in found:
            found.add(model)
            left += calls[model].values()
    return found


def _check_route(where: str, route: RouteConfig) -> Iterator[str]:
    for index, rule in enumerate(route.rules):
        at, when = f"{where}.rules[{index}].when", rule.when
        if any(lane not in _LANES for lane in when.lanes or ()):
            yield f"{at}.lanes must contain P0, P1 or P2"
        if any(name != name.lower() for name in when.headers):
            yield f"{at}.headers must have names in lower case"
        least, most = when.min_prompt_bytes, when.max_prompt_bytes
        if least is not None and most is not None and least > most:
            yield f"{at}.min_prompt_bytes is above max_prompt_bytes"
    if (classify := route.classify) is not None:
        if not classify.labels or not all(classify.labels):
            yield f"{where}.classify.labels needs labels that are not empty"
        if classify.timeout_ms < 1 or classify.max_tokens < 1:
            yield f"{where}.classify.timeout_ms and max_tokens must be at least 1"


def _check_cascade(where: str, cascade: CascadeConfig) -> Iterator[str]:
    accept = cascade.accept
    if cascade.small == cascade.large:
        yield f"{where}.small and large are the same model"
    if not 0 <= cascade.shadow <= 1:
        yield f"{where}.shadow must be between 0 and 1"
    for name in ("min_mean_logprob", "min_token_logprob"):
        value = getattr(accept, name)
        if value is not None and value > 0:
            yield f"{where}.accept.{name} must not be above 0: log probabilities are not"
    if not accept.needs_logprobs and accept.verifier is None and not accept.schema:
        yield f"{where}.accept accepts every answer: set a log probability, a schema or a verifier"
    if accept.verifier is not None:
        yield from _check_verifier(f"{where}.accept.verifier", accept.verifier)


def _check_ensemble(where: str, ensemble: EnsembleConfig) -> Iterator[str]:
    if not 2 <= len(ensemble.models) <= 16:
        yield f"{where}.models must have 2 to 16 members"
    if not 1 <= ensemble.min_answers <= len(ensemble.models):
        yield f"{where}.min_answers must be between 1 and the number of models"
    if (ensemble.choose == "verifier") != (ensemble.verifier is not None):
        yield f"{where}.verifier is for `choose: verifier`, which needs it"
    if ensemble.verifier is not None:
        yield from _check_verifier(f"{where}.verifier", ensemble.verifier)


def _check_verifier(where: str, verifier: VerifierConfig) -> Iterator[str]:
    if (verifier.model is None) == (verifier.function is None):
        yield f"{where} needs either a model or a function"
    if verifier.timeout_ms < 1:
        yield f"{where}.timeout_ms must be at least 1"
    if verifier.function is not None:
        try:
            load_function(verifier.function)
        except ValueError as error:
            yield f"{where}.function {error}"
