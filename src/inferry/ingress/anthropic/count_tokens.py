"""`POST /v1/messages/count_tokens`: the prompt tokens of a Messages request."""

from collections.abc import Mapping

import msgspec

from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import Caller
from inferry.domain.errors import ModelNotAllowed, NotFound, NoWorker
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.anthropic.decode import decode_count
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.headers import identifier, request_id
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.job_ids import new_job_id
from inferry.ingress.job_parser import body_for, check_features, find_card, tokenize_long
from inferry.ingress.openai.decode import check_ranges
from inferry.ingress.openai.prompt import PromptText, read_prompt
from inferry.ingress.router import JSON, Fail, Refuse, Router
from inferry.ingress.run_identity import identity
from inferry.pipelines.composed import ComposedModel
from inferry.pipelines.versions import ComposedVersions


class TokenCountsRouter(Router):
    """Counts with the model's tokenizer, else asks a worker, else estimates. Of composed models it estimates."""

    prefix = "/v1/messages/count_tokens"
    paths = (f"POST {prefix}",)
    format = MessagesFormat()

    def __init__(self, refuse: Refuse, fail: Fail, gateway: Gateway) -> None:
        super().__init__(refuse, fail)
        self._gateway = gateway
        self.composed = ComposedVersions()

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        if path != self.prefix:
            raise NotFound("unknown path")
        if request.method != b"POST":
            raise WrongMethod(self.prefix, "POST")
        self.respond_later(self._respond(request, reply, caller), request, reply)

    async def _respond(self, request: Request, reply: Reply, caller: Caller) -> None:
        with self._gateway.reserved_bytes(len(request.body)):
            count, is_exact = await self._count(request, caller)
        headers = b"%bx-inferry-token-count: %b\r\n%b" % (
            JSON,
            b"exact" if is_exact else b"estimated",
            self.format.id_headers(request_id(request.headers) or new_job_id()),
        )
        reply.respond(200, headers, msgspec.json.encode({"input_tokens": count}))

    async def _count(self, request: Request, caller: Caller) -> tuple[int, bool]:
        """The prompt's tokens, and whether they were counted."""
        models = self._gateway.models
        decoded = decode_count(request.body, self.format)
        check_ranges(decoded.wire)
        if self._is_composed(decoded.wire.model, request, caller):
            model = self._typical_model(decoded.wire.model, request, caller)
            return self._estimate(model, request, caller, len(decoded.body)), False
        card = find_card(decoded.wire.model, models, caller)
        check_features(decoded, card)
        body = body_for(decoded, card)
        prompt = read_prompt(decoded.wire, body, card, models.tokenizer(card.name))
        if isinstance(prompt, PromptText):
            return len(await tokenize_long(prompt)), True
        count = await self._gateway.count_tokens(card.name, caller.pool, body)
        if count is not None:
            return count, True
        return self._estimate(card.name, request, caller, len(body)), False

    def _estimate(self, model: str, request: Request, caller: Caller, size: int) -> int:
        template_id = identifier(request.headers, b"x-inferry-template-id")
        return self._gateway.models.estimate_prompt(caller.tenant.name, model, template_id, size).expected

    def _is_composed(self, name: str, request: Request, caller: Caller) -> bool:
        """Whether the name is that of a composed model. Raises ModelNotAllowed."""
        if name not in self._composed(request, caller):
            return False
        try:
            is_served = self._gateway.models.card(name, caller.pool) is not None
        except NoWorker:
            is_served = False
        if not is_served and not caller.allows_model(name):
            raise ModelNotAllowed(f"this key may not use the model `{name}`", param="model")
        return not is_served

    def _typical_model(self, name: str, request: Request, caller: Caller) -> str:
        """The model behind a composed one, also through others; itself where it has none."""
        composed = self._composed(request, caller)
        for _ in range(len(composed)):
            if name not in composed:
                break
            name = composed[name].typical_model or name
        return name

    def _composed(self, request: Request, caller: Caller) -> Mapping[str, ComposedModel]:
        run = identity(request.headers, new_job_id())
        return self.composed.of(caller.tenant.name, run.run_id).models
