"""The models and LoRA adapters of a server, from its configuration and its list."""

from collections.abc import Mapping

from inferry.domain.ports import ModelCard
from inferry.domain.routes import Task
from inferry.workers.openai_http.profiles import Profile
from inferry.workers.openai_http.server_queries import ServedModel
from inferry.workers.openai_http.settings import HttpWorkerSettings

_UNLISTED = ServedModel(id="")


def model_parents(settings: HttpWorkerSettings, listed: Mapping[str, ServedModel]) -> dict[str, str | None]:
    """The names to serve, each with the base model if it is an adapter.

    Without `models` in the configuration all listed names are served. An adapter is one that the configuration names as
    such, or that the server lists with a parent.
    """
    models = settings.models or tuple(listed)
    if not models:
        return {}
    base = next((name for name in models if name not in settings.adapters), models[0])
    return {
        name: listed.get(name, _UNLISTED).parent or (base if name in settings.adapters else None)
        for name in (*models, *settings.adapters)
    }


def model_cards(
    parents: Mapping[str, str | None],
    listed: Mapping[str, ServedModel],
    profile: Profile,
    settings: HttpWorkerSettings,
    tasks: frozenset[Task],
) -> tuple[ModelCard, ...]:
    """The cards of a server that has started. A context that it does not list is the configured one."""
    return tuple(
        ModelCard(
            name=name,
            context_tokens=listed.get(name, _UNLISTED).max_model_len or settings.context_tokens,
            can_resume=profile.can_resume,
            features=profile.features,
            fields=profile.fields,
            tasks=tasks,
            created=listed.get(name, _UNLISTED).created,
            parent=parent,
            media_tokens=settings.media_tokens,
        )
        for name, parent in parents.items()
    )
