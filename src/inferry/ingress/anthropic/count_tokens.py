"""`POST /v1/messages/count_tokens`: the prompt tokens of a Messages request."""

import msgspec

from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import Caller
from inferry.domain.errors import NotFound
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.anthropic.decode import decode_count
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.headers import identifier, request_id
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.job_ids import new_job_id
from inferry.ingress.openai.parse import body_for, check_features, find_card, tokenize_long
from inferry.ingress.openai.prompt import PromptText, read_prompt
from inferry.ingress.router import JSON, Fail, Refuse, Router


class TokenCountsRouter(Router):
    """Counts with the model's tokenizer, else asks a worker, else estimates."""

    prefix = "/v1/messages/count_tokens"
    paths = (f"POST {prefix}",)
    format = MessagesFormat()

    def __init__(self, refuse: Refuse, fail: Fail, gateway: Gateway) -> None:
        super().__init__(refuse, fail)
        self._gateway = gateway

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
        card = find_card(decoded.wire.model, models, caller)
        check_features(decoded, card)
        body = body_for(decoded, card)
        prompt = read_prompt(decoded.wire, body, card, models.tokenizer(card.name))
        if isinstance(prompt, PromptText):
            return len(await tokenize_long(prompt)), True
        count = await self._gateway.count_tokens(card.name, caller.pool, body)
        if count is not None:
            return count, True
        template_id = identifier(request.headers, b"x-inferry-template-id")
        return models.estimator.prompt(caller.tenant.name, card.name, template_id, len(body)).expected, False
