"""Wire to job: a body and its headers become an InferenceJob, or a GatewayError that says what is wrong with them."""

import asyncio
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple
from zlib import crc32

import msgspec
from msgspec import UNSET, Raw

from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import Caller
from inferry.domain.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotAllowed,
    ModelNotFound,
    NoWorker,
    UnsupportedFeature,
)
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, Resume
from inferry.domain.lanes import Lane
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.ingress.contents import check_contents
from inferry.ingress.features import features_of, is_given
from inferry.ingress.harness import identity
from inferry.ingress.headers import identifier, lane_of, request_id, tier_of, whole_number
from inferry.ingress.repeats import IDEMPOTENCY_KEY, repeat_of
from inferry.ingress.wire import Body, ChatBody, CompletionBody, Message, RawMessages, StreamOptions

Api = Literal["chat", "completions"]

NOT_WORTH_PREDICTING = 32
"""A job that may write no more than this is taken to write all of it."""
UNBOUNDED_OUTPUT_TOKENS = 4096
"""Budget assumed for a call that names none, to an engine whose context is unknown."""
COMPLETIONS_DEFAULT_TOKENS = 16
"""The completions API's own default."""
INLINE_TOKENIZE_BYTES = 8192
"""Longer prompts are tokenised off the event loop."""
MOST_STOPS = 16
LONGEST_STOP = 1024
MOST_STOP_TOKENS = 256
_CONTINUED = frozenset({"min_p", "min_tokens", "logit_bias", "repetition_penalty"})
"""Features, or fields of them, that mean the same to a job that goes on from its own output as a longer prompt: a
repetition penalty looks at prompt and output alike, the other penalties at the output alone."""
_IN_ONE_PIECE = frozenset({"prompt_logprobs", "beam_search", "echo"})
"""Features of answers in one piece: streams lack them, or say less about the prompt."""
GREEDY_BELOW = 1e-5
"""Temperatures below this mean the best token: dividing by them would overflow."""
LARGEST_ID = 2**31 - 1
LARGEST_OUTPUT = 1_000_000
"""No engine is believed to write more than this in one call, where neither the call nor its context says."""
HASHED_END_BYTES = 8192
"""How much of either end of a long text counts in a prompt's hash."""

_PATH = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)

# Few threads: several long prompts at once must not take the processors from everybody else.
_tokenising = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_messages_decoder = msgspec.json.Decoder(list[Message])
_raw_messages_decoder = msgspec.json.Decoder(RawMessages)
# Job ids are the ledger's key, so they must differ between gateways and between lives of one gateway.
_id_prefix = f"{int(time.time()):x}{os.urandom(3).hex()}"
_id_counter = itertools.count(1)


def new_job_id() -> str:
    return f"{_id_prefix}-{next(_id_counter)}"


def parse(
    api: Api, body: bytes, headers: Mapping[bytes, bytes], gateway: Gateway, caller: Caller
) -> "InferenceJob | LongPrompt":
    """The job a request asks for. Everything that can be known to be wrong with it is found here."""
    wire = _decode(api, body)
    isolation = caller.pool
    card = gateway.cards(isolation).get(wire.model)
    if card is None:
        if isolation is not None and not gateway.cards(isolation):
            raise NoWorker("the tenant's own pool has no workers", retry_after_s=2.0)
        if not gateway.knows_its_models:
            raise NoWorker("some workers are still to say which models they serve", retry_after_s=2.0)
        raise ModelNotFound(f"the model `{_shown(wire.model)}` is not served here", param="model")
    if not caller.may_use(card.name):
        raise ModelNotAllowed(f"the model `{card.name}` is not for this key", param="model")
    asked = _check_ranges(wire)
    features = features_of(wire)
    for feature, param in features:
        if feature not in card.features:
            raise UnsupportedFeature(f"model `{card.name}` is served without support for `{param}`", param=param)
    call = _Call(api, wire, asked, features, body, headers, card, gateway, caller, gateway.clock.now())
    prompt = _prompt(wire, body, card, gateway.tokenizer(card.name))
    if prompt is None:
        template_id = identifier(headers, b"x-inferry-template-id")
        size = gateway.estimate_prompt(caller.tenant.name, card.name, template_id, len(body))
        return _job(call, None, size)
    if isinstance(prompt, _Text):
        if prompt.size > INLINE_TOKENIZE_BYTES:
            return LongPrompt(call, prompt)
        prompt = prompt.encode()
    return _tokenised(call, prompt)


class _Call(NamedTuple):
    """What a request said, checked as far as it can be without its prompt's tokens."""

    api: Api
    wire: ChatBody | CompletionBody
    asked: int | None
    features: list[tuple[str, str]]
    body: bytes
    headers: Mapping[bytes, bytes]
    card: ModelCard
    gateway: Gateway
    caller: Caller
    now: float


class _Text(NamedTuple):
    """A prompt that is to be tokenised."""

    size: int
    encode: Callable[[], list[int]]


class LongPrompt:
    """A call whose prompt takes too long to tokenise on the event loop."""

    def __init__(self, call: _Call, text: _Text) -> None:
        self._call = call
        self._text = text

    async def job(self) -> InferenceJob:
        ids = await asyncio.get_running_loop().run_in_executor(_tokenising, self._text.encode)
        return _tokenised(self._call, ids)


def _tokenised(call: _Call, ids: list[int]) -> InferenceJob:
    if not ids:
        raise InvalidRequest("the prompt is empty", param="messages" if call.api == "chat" else "prompt")
    return _job(call, tuple(ids), Estimate.exactly(len(ids)))


def _job(call: _Call, prompt_ids: tuple[int, ...] | None, prompt: Estimate) -> InferenceJob:
    api, wire, asked, features, body, headers, card, gateway, caller, now = call
    template_id = identifier(headers, b"x-inferry-template-id")
    budget = _budget(asked, prompt, card, api)
    lane = lane_of(headers, wire.service_tier, caller)
    job_id = new_job_id()
    run_id, step_id, parent_run, session = identity(headers, job_id)
    step_named = None if step_id == job_id else step_id
    hint = whole_number(headers, b"x-inferry-expected-output-tokens")
    tenant = caller.tenant.name
    if budget <= NOT_WORTH_PREDICTING or wire.ignore_eos:
        output = Estimate.exactly(budget)
    else:
        output = gateway.predict_output(tenant, card.name, prompt.expected, budget, template_id, hint)
    cached, prefix = gateway.meet_prompt(card.name, tenant, body, prompt)
    max_wait_ms = whole_number(headers, b"x-inferry-max-wait-ms")
    deadline_ms = whole_number(headers, b"x-inferry-deadline-ms")
    stream = wire.stream is True
    options = wire.stream_options
    route = RouteKey(card.name, isolation=caller.pool)
    return InferenceJob(
        job_id=job_id,
        request_id=request_id(headers) or job_id,
        tenant=tenant,
        key_id=None if caller.key is None else caller.key.key_id,
        run_id=run_id,
        step_id=step_named or identifier(headers, IDEMPOTENCY_KEY) or job_id,
        parent_run=parent_run,
        session=wire.prompt_cache_key or session or wire.user,
        salted=caller.tenant.isolation != "none",
        template_id=template_id,
        lane=lane,
        route=route,
        batch_key=BatchKey(route, streaming=stream),
        footprint=Footprint(prompt, cached, output),
        prefix=prefix,
        output_hint=hint,
        token_budget=budget,
        prompt_hash=_prompt_hash(wire, len(body)),
        arrived_at=now,
        max_wait_s=(gateway.lanes[lane].max_wait_ms if max_wait_ms is None else max_wait_ms) / 1000,
        deadline=None if deadline_ms is None else now + deadline_ms / 1000,
        stream=stream,
        resume=_resume(wire, features, card, lane, gateway),
        repeat=repeat_of(headers, None if run_id == job_id else run_id, step_named),
        payload=Payload(
            api=api,
            body=body,
            sampling=_sampling(wire, budget),
            prompt_ids=prompt_ids,
            include_usage=isinstance(options, StreamOptions) and options.include_usage is True,
            output_limit=_output_limit(asked, _answers(wire), card),
            stream_fields=(wire.stream is not UNSET, options is not UNSET),
            choices=wire.n or 1,
            tier=None if wire.service_tier is None else tier_of(lane),
            context_tokens=card.context_tokens,
            whole=not stream and any(feature in _IN_ONE_PIECE for feature, _ in features),
        ),
    )


def _resume(
    wire: ChatBody | CompletionBody, features: list[tuple[str, str]], card: ModelCard, lane: Lane, gateway: Gateway
) -> Resume:
    """Whether the job can go on elsewhere once its client has seen some of it: where that is exact, and of use."""
    if not gateway.continues(card, lane):
        return Resume.RESTART
    if features and any(feature not in _CONTINUED and param not in _CONTINUED for feature, param in features):
        return Resume.RESTART
    is_sampled = wire.temperature is None or wire.temperature >= GREEDY_BELOW
    # Any sample is as good as another, but a seed asks for one: most engines draw anew where they go on.
    return Resume.RESTART if wire.seed is not None and is_sampled and not card.continues_seeds else Resume.CONTINUE


# -- the body --------------------------------------------------------------------------------------------------------


def _decode(api: Api, body: bytes) -> ChatBody | CompletionBody:
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    decoder: msgspec.json.Decoder[Any] = _chat_decoder if api == "chat" else _completion_decoder
    try:
        wire: ChatBody | CompletionBody = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_shape(error) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if isinstance(wire, ChatBody):
        if not wire.messages:
            raise InvalidRequest("`messages` must hold at least one message", param="messages")
        check_contents(wire.messages)
    return wire


def _wrong_shape(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec's account with the path as `param`. Its messages name types and fields, never values ... but one."""
    found = _PATH.match(str(error))
    what, path = (found[1], found[2]) if found else (str(error), "")
    if what.startswith("Invalid enum value"):
        # The only message that quotes what the client wrote.
        what = "not one of the allowed values"
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"`{param}` is required", param=param)
    where = f"`{path}`: " if path else "the body: "
    return InvalidRequest(f"{where}{what[:1].lower()}{what[1:]}", param=path or None)


def _check_ranges(wire: ChatBody | CompletionBody) -> int | None:
    """Refuse values that no engine takes; return the output limit asked for."""
    limit, name = wire.max_tokens, "max_tokens"
    if isinstance(wire, ChatBody) and wire.max_completion_tokens is not None:
        limit, name = wire.max_completion_tokens, "max_completion_tokens"
    if limit is not None and limit < 1:
        raise InvalidRequest(f"`{name}` must be at least 1", param=name)
    if limit is not None and limit > LARGEST_ID:
        raise InvalidRequest(f"`{name}` must be at most {LARGEST_ID}", param=name)
    if (temperature := wire.temperature) is not None and not 0.0 <= temperature <= 2.0:
        raise _out_of_range("temperature", temperature, 2)
    if (top_p := wire.top_p) is not None and not 0.0 <= top_p <= 1.0:
        raise _out_of_range("top_p", top_p, 1)
    if (min_p := wire.min_p) is not None and not 0.0 <= min_p <= 1.0:
        raise _out_of_range("min_p", min_p, 1)
    if top_p == 0.0:
        raise InvalidRequest("`top_p` must be above 0", param="top_p")
    if wire.top_k is not None and not -1 <= wire.top_k <= LARGEST_ID:
        raise InvalidRequest(f"`top_k` must be -1 or 0 (no limit), or at most {LARGEST_ID}", param="top_k")
    if wire.n is not None and not 1 <= wire.n <= 128:
        raise InvalidRequest(f"`n` must be between 1 and 128, got {wire.n}", param="n")
    if wire.seed is not None and not -(2**63) <= wire.seed < 2**63:
        raise InvalidRequest("`seed` must fit 64 bits", param="seed")
    if (ids := wire.stop_token_ids) and (
        len(ids) > MOST_STOP_TOKENS or not all(0 <= token <= LARGEST_ID for token in ids)
    ):
        raise InvalidRequest(f"`stop_token_ids` takes up to {MOST_STOP_TOKENS} token ids", param="stop_token_ids")
    if wire.stop:
        stops = [wire.stop] if isinstance(wire.stop, str) else wire.stop
        if len(stops) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
            raise InvalidRequest(
                f"`stop` takes up to {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters", param="stop"
            )
    return limit


def _out_of_range(field: str, value: float, most: int) -> InvalidRequest:
    return InvalidRequest(f"`{field}` must be between 0 and {most}, got {value:g}", param=field)


def _sampling(wire: Body, budget: int) -> Sampling:
    temperature, top_p, top_k, stop = wire.temperature, wire.top_p, wire.top_k, wire.stop
    if stop:
        stop = [stop] if isinstance(stop, str) else [one for one in stop if one]
    return Sampling(
        temperature=1.0 if temperature is None else 0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        seed=wire.seed,
        max_tokens=budget,
        stop=tuple(stop) if stop else (),
        stop_token_ids=tuple(wire.stop_token_ids) if wire.stop_token_ids else (),
        ignore_eos=bool(wire.ignore_eos),
    )


# -- the prompt ------------------------------------------------------------------------------------------------------


def _prompt(
    wire: ChatBody | CompletionBody, body: bytes, card: ModelCard, tokenizer: Tokenizer | None
) -> list[int] | _Text | None:
    """The prompt's token ids where the client sent them, its text where a tokenizer is at hand, else None."""
    if isinstance(wire, ChatBody):
        if tokenizer is None:
            return None
        messages = _messages(body)
        size = sum(len(str(message["content"]).encode()) for message in messages)
        _refuse_what_cannot_fit(size, tokenizer, card, "messages")
        return _Text(size, partial(tokenizer.encode_chat, messages))
    prompt = _completion_prompt(wire.prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            return None
        size = len(prompt.encode())
        _refuse_what_cannot_fit(size, tokenizer, card, "prompt")
        return _Text(size, partial(tokenizer.encode, prompt))
    largest = LARGEST_ID if card.vocab_size is None else card.vocab_size - 1
    if min(prompt) < 0 or max(prompt) > largest:
        raise InvalidRequest(f"`prompt` holds a token id outside 0 to {largest}", param="prompt")
    return prompt


def _refuse_what_cannot_fit(size: int, tokenizer: Tokenizer, card: ModelCard, param: str) -> None:
    """Before any time is spent on tokenising it."""
    at_least = size // tokenizer.longest_token_bytes
    if card.context_tokens is not None and at_least > card.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has at least {at_least} tokens; the context of `{card.name}` is {card.context_tokens} tokens",
            param=param,
        )


def _messages(body: bytes) -> list[dict[str, object]]:
    """The messages with text contents, as a chat template wants them."""
    try:
        messages = _messages_decoder.decode(_raw_messages_decoder.decode(body).messages)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        wrong = _wrong_shape(error)
        param = f"messages{wrong.param or ''}"
        raise InvalidRequest(f"`{param}` must be text or a list of text parts", param=param) from None
    plain: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is UNSET:
                    param = f"messages[{index}].content"
                    raise UnsupportedFeature(f"`{param}`: only text parts are supported here", param=param)
            content = "".join(str(part.text) for part in content)
        if is_given(message.tool_calls):
            param = f"messages[{index}].tool_calls"
            raise UnsupportedFeature(f"`{param}`: this model is served without support for tools", param=param)
        plain.append({"role": message.role, "content": content or ""})
    return plain


def _completion_prompt(raw: Raw) -> str | list[int]:
    try:
        prompt: Any = msgspec.json.decode(raw, type=str | list[int | str | list[int]])
    except msgspec.ValidationError:
        raise InvalidRequest("`prompt` must be text or a list of token ids", param="prompt") from None
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise UnsupportedFeature(
                "several prompts in one call are not supported: send one call each", param="prompt"
            )
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise InvalidRequest("`prompt` must be text or a list of token ids", param="prompt")
    if not prompt:
        raise InvalidRequest("`prompt` is empty", param="prompt")
    return prompt  # type: ignore[no-any-return]


def _budget(asked: int | None, prompt: Estimate, card: ModelCard, api: Api) -> int:
    """How many tokens the job may write; refuses what cannot fit the context whatever the prompt turns out to be."""
    context = card.context_tokens
    if context is not None:
        if prompt.low >= context:
            raise ContextLengthExceeded(
                f"the prompt has {prompt.low} tokens; the context of `{card.name}` is {context} tokens, "
                "and at least one must be left for the answer",
                param="messages" if api == "chat" else "prompt",
            )
        if asked is not None and prompt.low + asked > context:
            about = "" if prompt.is_exact else "at least "
            raise ContextLengthExceeded(
                f"{about}{prompt.low} prompt tokens and max_tokens {asked} exceed the context of `{card.name}`, "
                f"{context} tokens",
                param="max_tokens",
            )
    if asked is not None:
        return asked
    left = UNBOUNDED_OUTPUT_TOKENS if context is None else max(1, context - prompt.expected)
    if api == "completions":
        return min(left, COMPLETIONS_DEFAULT_TOKENS)
    return left if card.default_output_tokens is None else min(left, card.default_output_tokens)


def _output_limit(asked: int | None, answers: int, card: ModelCard) -> int:
    """Tokens that an engine which keeps its word cannot exceed, over all answers that it writes."""
    most = asked if asked is not None else card.context_tokens
    return LARGEST_OUTPUT if most is None else most * answers


def _answers(wire: ChatBody | CompletionBody) -> int:
    """How many answers are written, those that are not shown among them."""
    best_of = wire.best_of if isinstance(wire, CompletionBody) else None
    return max(wire.n or 1, best_of or 1)


def _prompt_hash(wire: ChatBody | CompletionBody, size: int) -> str:
    """Equal for equal prompts to one model, however the rest of the bodies differs. `size` is that of the whole body.

    A hint for grouping, not a proof of identity: a checksum, and of something long only of its ends and its length.
    """
    found = crc32(wire.model.encode())
    if isinstance(wire, CompletionBody):
        found = _checksum(wire.prompt, found)
    elif size <= 2 * HASHED_END_BYTES:  # and so is all that is in it
        for message in wire.messages:
            found = crc32(message.content, (found + len(message.role)) & 0xFFFFFFFF)
    else:
        for message in wire.messages:
            found = _checksum(message.content, found + len(message.role))
    return f"{found:08x}"


def _checksum(raw: Raw, so_far: int) -> int:
    view = memoryview(raw)
    if len(view) <= 2 * HASHED_END_BYTES:
        return crc32(view, so_far & 0xFFFFFFFF)
    so_far = crc32(b"%d" % len(view), so_far & 0xFFFFFFFF)
    return crc32(view[-HASHED_END_BYTES:], crc32(view[:HASHED_END_BYTES], so_far))


def _shown(name: str) -> str:
    """A name a client sent, short and printable enough to be repeated."""
    return "".join(char if char.isprintable() else "?" for char in name[:64])
