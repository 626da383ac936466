"""`/v1/models…`: the models that the caller may use, in OpenAI's shape, or in Anthropic's for its clients."""

from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest, ModelNotFound
from inferry.domain.ports import ModelCard
from inferry.domain.workers import Phase
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.errors import printable
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.router import JSON, Fail, Refuse, Router
from inferry.ingress.wire_format import WireFormat
from inferry.pipelines.versions import ComposedVersions

MAX_LISTED = 1000
DEFAULT_LISTED = 20


class ModelsRouter(Router):
    prefix = "/v1/models"
    paths = ("GET /v1/models", "GET /v1/models/{model}")

    def __init__(self, refuse: Refuse, fail: Fail, gateway: Gateway) -> None:
        super().__init__(refuse, fail)
        self._gateway = gateway
        self.composed = ComposedVersions()
        self._anthropic_format = MessagesFormat()

    def format_of(self, request: Request) -> WireFormat:
        return self._anthropic_format if _is_anthropic(request) else self.format

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        name = unquote(path.removeprefix(self.prefix)[1:])
        if request.method not in (b"GET", b"HEAD"):
            raise WrongMethod(f"{self.prefix}/{{model}}" if name else self.prefix, "GET, HEAD")
        cards = {
            name: card for name, card in self._gateway.models.cards(caller.pool).items() if caller.allows_model(name)
        }
        cards |= {name: ModelCard(name=name) for name in self._kinds() if caller.allows_model(name)}
        for_anthropic = _is_anthropic(request)
        if not name:
            found = _anthropic_page(cards, query) if for_anthropic else self._list(cards, caller)
        else:
            card = cards.get(name)
            if card is None:
                raise ModelNotFound(f"unknown model `{printable(name)}`", param="model")
            found = _anthropic_model(card) if for_anthropic else self._openai_model(card, self._ready_models(caller))
        reply.respond(200, JSON, msgspec.json.encode(found))

    def _kinds(self) -> dict[str, str]:
        """Kinds of the composed models of the active settings by name."""
        return {name: model.kind for name, model in self.composed.active.models.items()}

    def _list(self, cards: dict[str, ModelCard], caller: Caller) -> dict[str, Any]:
        ready = self._ready_models(caller)
        return {"object": "list", "data": [self._openai_model(card, ready) for card in cards.values()]}

    def _ready_models(self, caller: Caller) -> set[str]:
        views = [v for v in self._gateway.views() if v.phase is Phase.READY and v.isolation == caller.pool]
        ready = {model for v in views if caller.precision in (None, v.precision) for model in v.models}
        return ready | set(self._kinds()) if ready else ready

    def _openai_model(self, card: ModelCard, ready: set[str]) -> dict[str, Any]:
        kind = self._kinds().get(card.name)
        return {
            "id": card.name,
            "object": "model",
            "created": card.created,
            "owned_by": "inferry" if kind is None else f"inferry-{kind}",
            "max_model_len": card.context_tokens,
            "parent": card.parent,
            "ready": card.name in ready,
            "tasks": sorted(task.value for task in card.tasks),
        }


def _is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API sent the request."""
    return b"anthropic-version" in request.headers


def _anthropic_model(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(min(max(card.created, 0), 2**40), UTC)
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card.context_tokens,
        "lifecycle": "active",
    }


def _anthropic_page(cards: dict[str, ModelCard], query: str) -> dict[str, Any]:
    """A page of the list: after or before a model, at most `limit`."""
    params = dict(parse_qsl(query, keep_blank_values=True))
    limit_text = params.get("limit", str(DEFAULT_LISTED))
    if not (limit_text.isascii() and limit_text.isdigit() and 1 <= int(limit_text[:9]) <= MAX_LISTED):
        raise InvalidRequest(f"`limit` must be between 1 and {MAX_LISTED}", param="limit")
    limit, names = int(limit_text), list(cards)
    before = params.get("before_id")
    if before is not None:
        names = names[: _position(names, before, "before_id")]
        page, has_more = names[-limit:], len(names) > limit
    else:
        after = params.get("after_id")
        if after is not None:
            names = names[_position(names, after, "after_id") + 1 :]
        page, has_more = names[:limit], len(names) > limit
    return {
        "data": [_anthropic_model(cards[name]) for name in page],
        "has_more": has_more,
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _position(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidRequest(f"`{param}` names no model of the list", param=param)
    return names.index(name)
