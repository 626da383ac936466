"""Makes summaries in the background, stores the originals, and finds the summary of a conversation.

Belongs to one event loop. A summary is made by a call of the same caller and run, in P2. While it is made, calls of the
conversation are served unchanged.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from msgspec import Raw, Struct

from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError
from inferry.durable.documents import Documents
from inferry.ingress.histories.conversation import HistorySettings, Summary, cut_at, summary_request
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.internal_call import call as call_endpoint

log = logging.getLogger(__name__)

KIND = "history"
OPT_OUT = b"x-inferry-history"
MAX_KNOWN = 10_000
"""Summaries kept in memory, the last used ones."""
RETRY_S = 60.0
"""Time until a summary that failed is tried again."""
_CHAT = b"/v1/chat/completions"


class StoredHistory(Struct, frozen=True):
    """What is stored of a summarised conversation. `messages` are the original."""

    model: str
    summary: str
    messages: list[Raw]


class _Message(Struct):
    content: str | None = None


class _Choice(Struct):
    message: _Message


class _Answer(Struct):
    choices: list[_Choice]


class _Error(Struct):
    code: str | None = None
    message: str = ""


class _Refusal(Struct):
    error: _Error


_answer_decoder = msgspec.json.Decoder(_Answer)
_refusal_decoder = msgspec.json.Decoder(_Refusal)


class Summaries:
    """`settings` by model, `*` for any other. `serve` makes calls of the gateway's own endpoints."""

    def __init__(
        self,
        settings: dict[str, HistorySettings],
        documents: Documents,
        serve: Callable[[Request, Reply], None],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._documents = documents
        self._serve = serve
        self._clock = clock
        self._known: OrderedDict[str, Summary] = OrderedDict()
        self._making: dict[str, asyncio.Task[Summary | None]] = {}
        self._failed_at: dict[str, float] = {}

    def settings_of(self, model: str, tenant: str) -> HistorySettings | None:
        found = self._settings.get(model) or self._settings.get("*")
        return None if found is None or (found.tenants is not None and tenant not in found.tenants) else found

    async def find(self, ids: list[str], tenant: str) -> Summary | None:
        """The summary of the longest prefix that has one, whose original is stored: it may have expired, or another
        process may have deleted it.
        """
        for id in reversed(ids):
            if (summary := self._known.get(id)) is not None:
                if await self._documents.get(tenant, KIND, id) is not None:
                    if id in self._known:
                        self._known.move_to_end(id)
                    return summary
                self.forget(id)
        return None

    def begin(
        self, messages: list[Raw], ids: list[str], known: Summary | None, model: str, caller: Caller, request: Request
    ) -> "asyncio.Task[Summary | None] | None":
        """Start a summary of what has no summary yet, unless one of the same conversation is being made; None where
        nothing can be summarised.
        """
        settings = self.settings_of(model, caller.tenant.name)
        assert settings is not None
        for id in reversed(ids):
            if (task := self._making.get(id)) is not None:
                return task
        covered = cut_at(messages, settings.keep_messages, 0 if known is None else known.messages)
        if covered is None:
            return None
        id = ids[covered - 1]
        failed_at = self._failed_at.get(id)
        if failed_at is not None and self._clock.now() - failed_at < RETRY_S:
            return None
        work = self._make(id, messages, known, covered, settings, model, caller, request)
        task = self._making[id] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._making.pop(id, None))
        return task

    def forget(self, id: str) -> None:
        """The original was deleted: its summary is not used any more."""
        self._known.pop(id, None)

    async def close(self) -> None:
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)

    async def _make(
        self,
        id: str,
        messages: list[Raw],
        known: Summary | None,
        covered: int,
        settings: HistorySettings,
        model: str,
        caller: Caller,
        request: Request,
    ) -> Summary | None:
        tenant = caller.tenant.name
        try:
            stored = await self._documents.get(tenant, KIND, id)
            if stored is not None:  # made by another process, or before a restart
                text: str | None = msgspec.json.decode(stored.content, type=StoredHistory).summary
            else:
                asked = summary_request(messages, known, covered, settings)
                text = await self._ask(settings.summary_model or model, asked, settings, caller, request)
                if text is not None:
                    content = msgspec.json.encode(StoredHistory(model, text, messages[:covered]))
                    await self._documents.put(tenant, KIND, id, content, ttl_s=settings.ttl_s, is_limited=True)
        except GatewayError as error:
            log.warning("a history was not summarised: %s", error.code)
            text = None
        except Exception as error:  # an answer of another shape, or a call that was reset
            log.warning("a history was not summarised: %s", type(error).__name__)
            text = None
        if text is None:
            self._failed_at[id] = self._clock.now()
            while len(self._failed_at) > MAX_KNOWN:
                del self._failed_at[next(iter(self._failed_at))]
            return None
        summary = self._known[id] = Summary(id, covered, text)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return summary

    async def _ask(
        self, model: str, messages: list[Raw], settings: HistorySettings, caller: Caller, request: Request
    ) -> str | None:
        body = {"model": model, "messages": messages, "max_tokens": settings.max_summary_tokens, "temperature": 0}
        headers = {b"x-inferry-lane": b"P2", b"x-inferry-step-id": b"history-summary", OPT_OUT: b"off"}
        headers |= {
            name: value
            for name in (b"x-inferry-run-id", b"x-inferry-parent-run-id")
            if (value := request.headers.get(name)) is not None
        }
        answer = await call_endpoint(self._serve, _CHAT, msgspec.json.encode(body), headers, caller)
        if answer.status != 200:
            reason = _refusal(answer.body, model)
            log.warning("a history was not summarised: the call of `%s` got %d, %s", model, answer.status, reason)
            return None
        return _answer_decoder.decode(answer.body).choices[0].message.content or None


def _refusal(body: bytes, model: str) -> str:
    """Code and message of an error, for the log."""
    try:
        error = _refusal_decoder.decode(body).error
    except msgspec.MsgspecError:
        return "an error of another shape"
    # The message of these two may be the engine's own, which may quote the prompt.
    if error.code == "context_length_exceeded":
        what = "older messages, instruction and `max_summary_tokens`"
        return f"{error.code}: {what} together exceed the context of `{model}`"
    if error.code == "invalid_request":
        return error.code
    return f"{error.code}: {error.message}"
