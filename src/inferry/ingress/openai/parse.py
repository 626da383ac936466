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
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.ingress.harness import identity
from inferry.ingress.headers import identifier, int_header, lane_of, request_id, tier_of
from inferry.ingress.idempotency import IDEMPOTENCY_KEY, parse_idempotency
from inferry.ingress.openai.features import features_of, is_given
from inferry.ingress.openai.message_content import check_contents
from inferry.ingress.openai.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    RawMessages,
    StreamOptions,
)

Api = Literal["chat", "completions"]

MIN_PREDICTED_TOKENS = 32
"""A job that may write no more than this is taken to write all of it."""
UNBOUNDED_OUTPUT_TOKENS = 4096
"""Budget assumed for a call that names none, to an engine whose context is unknown."""
COMPLETIONS_DEFAULT_TOKENS = 16
"""The completions API's own default."""
INLINE_TOKENIZE_BYTES = 8192
"""Longer prompts are tokenised off the event loop."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
_RESUMABLE_FEATURES = frozenset({"min_p", "min_tokens", "logit_bias", "repetition_penalty"})
"""Features, or fields of them, that mean the same to a job that goes on from its own output as a longer prompt: a
repetition penalty looks at prompt and output alike, the other penalties at the output alone."""
_NON_STREAMING_FEATURES = frozenset({"prompt_logprobs", "beam_search", "echo"})
"""Features of answers in one piece: streams lack them, or say less about the prompt."""
GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this mean the best token: dividing by them would overflow."""
MAX_TOKEN_ID = 2**31 - 1
MAX_OUTPUT_TOKENS = 1_000_000
"""No engine is believed to write more than this in one call, where neither the call nor its context says."""
HASHED_TAIL_BYTES = 8192
"""How much of either end of a long text counts in a prompt's hash."""

_PATH = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)

# Few threads: several long prompts at once must not take the processors from everybody else.
_tokenizer_pool = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
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
        if not gateway.are_models_known:
            raise NoWorker("some workers are still to say which models they serve", retry_after_s=2.0)
        raise ModelNotFound(f"the model `{_sanitize(wire.model)}` is not served here", param="model")
    if not caller.allows_model(card.name):
        raise ModelNotAllowed(f"the model `{card.name}` is not for this key", param="model")
    requested_tokens = _check_ranges(wire)
    features = features_of(wire)
    for feature, param in features:
        if feature not in card.features:
            raise UnsupportedFeature(f"model `{card.name}` is served without support for `{param}`", param=param)
    call = _ParsedCall(api, wire, requested_tokens, features, body, headers, card, gateway, caller, gateway.clock.now())
    prompt = _prompt(wire, body, card, gateway.tokenizer(card.name))
    if prompt is None:
        template_id = identifier(headers, b"x-inferry-template-id")
        size = gateway.estimate_prompt(caller.tenant.name, card.name, template_id, len(body))
        return _job(call, None, size)
    if isinstance(prompt, _PromptText):
        if prompt.size > INLINE_TOKENIZE_BYTES:
            return LongPrompt(call, prompt)
        prompt = prompt.encode()
    return _job_from_ids(call, prompt)


class _ParsedCall(NamedTuple):
    """What a request said, checked as far as it can be without its prompt's tokens."""

    api: Api
    wire: ChatCompletionRequest | CompletionRequest
    requested_tokens: int | None
    features: list[tuple[str, str]]
    body: bytes
    headers: Mapping[bytes, bytes]
    card: ModelCard
    gateway: Gateway
    caller: Caller
    now: float


class _PromptText(NamedTuple):
    """A prompt that is to be tokenised."""

    size: int
    encode: Callable[[], list[int]]


class LongPrompt:
    """A call whose prompt takes too long to tokenise on the event loop."""

    def __init__(self, call: _ParsedCall, text: _PromptText) -> None:
        self._call = call
        self._text = text

    async def job(self) -> InferenceJob:
        ids = await asyncio.get_running_loop().run_in_executor(_tokenizer_pool, self._text.encode)
        return _job_from_ids(self._call, ids)


def _job_from_ids(call: _ParsedCall, ids: list[int]) -> InferenceJob:
    if not ids:
        raise InvalidRequest("the prompt is empty", param="messages" if call.api == "chat" else "prompt")
    return _job(call, tuple(ids), Estimate.exactly(len(ids)))


def _job(call: _ParsedCall, prompt_ids: tuple[int, ...] | None, prompt: Estimate) -> InferenceJob:
    api, wire, requested_tokens, features, body, headers, card, gateway, caller, now = call
    template_id = identifier(headers, b"x-inferry-template-id")
    budget = _budget(requested_tokens, prompt, card, api)
    lane = lane_of(headers, wire.service_tier, caller)
    job_id = new_job_id()
    run_id, step_id, parent_run, session = identity(headers, job_id)
    step_named = None if step_id == job_id else step_id
    hint = int_header(headers, b"x-inferry-expected-output-tokens")
    tenant = caller.tenant.name
    if budget <= MIN_PREDICTED_TOKENS or wire.ignore_eos:
        output = Estimate.exactly(budget)
    else:
        output = gateway.predict_output(tenant, card.name, prompt.expected, budget, template_id, hint)
    cached, prefix = gateway.match_prefix(card.name, tenant, body, prompt)
    max_wait_ms = int_header(headers, b"x-inferry-max-wait-ms")
    deadline_ms = int_header(headers, b"x-inferry-deadline-ms")
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
        repeat=parse_idempotency(headers, None if run_id == job_id else run_id, step_named),
        payload=Payload(
            api=api,
            body=body,
            sampling=_sampling(wire, budget),
            prompt_ids=prompt_ids,
            include_usage=isinstance(options, StreamOptions) and options.include_usage is True,
            output_limit=_output_limit(requested_tokens, _choice_count(wire), card),
            stream_fields=(wire.stream is not UNSET, options is not UNSET),
            choices=wire.n or 1,
            service_tier=None if wire.service_tier is None else tier_of(lane),
            context_tokens=card.context_tokens,
            non_streaming=not stream and any(feature in _NON_STREAMING_FEATURES for feature, _ in features),
        ),
    )


def _resume(
    wire: ChatCompletionRequest | CompletionRequest,
    features: list[tuple[str, str]],
    card: ModelCard,
    lane: Lane,
    gateway: Gateway,
) -> ResumeMode:
    """Whether the job can go on elsewhere once its client has seen some of it: where that is exact, and of use."""
    if not gateway.can_resume(card, lane):
        return ResumeMode.RESTART
    if features and any(
        feature not in _RESUMABLE_FEATURES and param not in _RESUMABLE_FEATURES for feature, param in features
    ):
        return ResumeMode.RESTART
    is_sampled = wire.temperature is None or wire.temperature >= GREEDY_BELOW_TEMPERATURE
    # Any sample is as good as another, but a seed asks for one: most engines draw anew where they go on.
    return (
        ResumeMode.RESTART
        if wire.seed is not None and is_sampled and not card.can_resume_seeded
        else ResumeMode.CONTINUE
    )


# -- the body --------------------------------------------------------------------------------------------------------


def _decode(api: Api, body: bytes) -> ChatCompletionRequest | CompletionRequest:
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    decoder: msgspec.json.Decoder[Any] = _chat_decoder if api == "chat" else _completion_decoder
    try:
        wire: ChatCompletionRequest | CompletionRequest = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _validation_error(error) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if isinstance(wire, ChatCompletionRequest):
        if not wire.messages:
            raise InvalidRequest("`messages` must hold at least one message", param="messages")
        check_contents(wire.messages)
    return wire


def _validation_error(error: msgspec.ValidationError) -> InvalidRequest:
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


def _check_ranges(wire: ChatCompletionRequest | CompletionRequest) -> int | None:
    """Refuse values that no engine takes; return the output limit asked for."""
    limit, name = wire.max_tokens, "max_tokens"
    if isinstance(wire, ChatCompletionRequest) and wire.max_completion_tokens is not None:
        limit, name = wire.max_completion_tokens, "max_completion_tokens"
    if limit is not None and limit < 1:
        raise InvalidRequest(f"`{name}` must be at least 1", param=name)
    if limit is not None and limit > MAX_TOKEN_ID:
        raise InvalidRequest(f"`{name}` must be at most {MAX_TOKEN_ID}", param=name)
    if (temperature := wire.temperature) is not None and not 0.0 <= temperature <= 2.0:
        raise _out_of_range("temperature", temperature, 2)
    if (top_p := wire.top_p) is not None and not 0.0 <= top_p <= 1.0:
        raise _out_of_range("top_p", top_p, 1)
    if (min_p := wire.min_p) is not None and not 0.0 <= min_p <= 1.0:
        raise _out_of_range("min_p", min_p, 1)
    if top_p == 0.0:
        raise InvalidRequest("`top_p` must be above 0", param="top_p")
    if wire.top_k is not None and not -1 <= wire.top_k <= MAX_TOKEN_ID:
        raise InvalidRequest(f"`top_k` must be -1 or 0 (no limit), or at most {MAX_TOKEN_ID}", param="top_k")
    if wire.n is not None and not 1 <= wire.n <= 128:
        raise InvalidRequest(f"`n` must be between 1 and 128, got {wire.n}", param="n")
    if wire.seed is not None and not -(2**63) <= wire.seed < 2**63:
        raise InvalidRequest("`seed` must fit 64 bits", param="seed")
    if (ids := wire.stop_token_ids) and (
        len(ids) > MAX_STOP_TOKEN_IDS or not all(0 <= token <= MAX_TOKEN_ID for token in ids)
    ):
        raise InvalidRequest(f"`stop_token_ids` takes up to {MAX_STOP_TOKEN_IDS} token ids", param="stop_token_ids")
    if wire.stop:
        stops = [wire.stop] if isinstance(wire.stop, str) else wire.stop
        if len(stops) > MAX_STOP_STRINGS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequest(
                f"`stop` takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters", param="stop"
            )
    return limit


def _out_of_range(field: str, value: float, maximum: int) -> InvalidRequest:
    return InvalidRequest(f"`{field}` must be between 0 and {maximum}, got {value:g}", param=field)


def _sampling(wire: GenerationRequest, budget: int) -> Sampling:
    temperature, top_p, top_k, stop = wire.temperature, wire.top_p, wire.top_k, wire.stop
    if stop:
        stop = [stop] if isinstance(stop, str) else [one for one in stop if one]
    return Sampling(
        temperature=1.0 if temperature is None else 0.0 if temperature < GREEDY_BELOW_TEMPERATURE else temperature,
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
    wire: ChatCompletionRequest | CompletionRequest, body: bytes, card: ModelCard, tokenizer: Tokenizer | None
) -> list[int] | _PromptText | None:
    """The prompt's token ids where the client sent them, its text where a tokenizer is at hand, else None."""
    if isinstance(wire, ChatCompletionRequest):
        if tokenizer is None:
            return None
        messages = _messages(body)
        size = sum(len(str(message["content"]).encode()) for message in messages)
        _check_prompt_fits(size, tokenizer, card, "messages")
        return _PromptText(size, partial(tokenizer.encode_chat, messages))
    prompt = _completion_prompt(wire.prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            return None
        size = len(prompt.encode())
        _check_prompt_fits(size, tokenizer, card, "prompt")
        return _PromptText(size, partial(tokenizer.encode, prompt))
    max_id = MAX_TOKEN_ID if card.vocab_size is None else card.vocab_size - 1
    if min(prompt) < 0 or max(prompt) > max_id:
        raise InvalidRequest(f"`prompt` holds a token id outside 0 to {max_id}", param="prompt")
    return prompt


def _check_prompt_fits(size: int, tokenizer: Tokenizer, card: ModelCard, param: str) -> None:
    """Before any time is spent on tokenising it."""
    least_tokens = size // tokenizer.longest_token_bytes
    if card.context_tokens is not None and least_tokens > card.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has at least {least_tokens} tokens; the context of `{card.name}` is "
            f"{card.context_tokens} tokens",
            param=param,
        )


def _messages(body: bytes) -> list[dict[str, object]]:
    """The messages with text contents, as a chat template wants them."""
    try:
        messages = _messages_decoder.decode(_raw_messages_decoder.decode(body).messages)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        wrong = _validation_error(error)
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


def _budget(requested_tokens: int | None, prompt: Estimate, card: ModelCard, api: Api) -> int:
    """How many tokens the job may write; refuses what cannot fit the context whatever the prompt turns out to be."""
    context = card.context_tokens
    if context is not None:
        if prompt.low >= context:
            raise ContextLengthExceeded(
                f"the prompt has {prompt.low} tokens; the context of `{card.name}` is {context} tokens, "
                "and at least one must be left for the answer",
                param="messages" if api == "chat" else "prompt",
            )
        if requested_tokens is not None and prompt.low + requested_tokens > context:
            about = "" if prompt.is_exact else "at least "
            raise ContextLengthExceeded(
                f"{about}{prompt.low} prompt tokens and max_tokens {requested_tokens} exceed the context of "
                f"`{card.name}`, "
                f"{context} tokens",
                param="max_tokens",
            )
    if requested_tokens is not None:
        return requested_tokens
    left = UNBOUNDED_OUTPUT_TOKENS if context is None else max(1, context - prompt.expected)
    if api == "completions":
        return min(left, COMPLETIONS_DEFAULT_TOKENS)
    return left if card.default_output_tokens is None else min(left, card.default_output_tokens)


def _output_limit(requested_tokens: int | None, answers: int, card: ModelCard) -> int:
    """Tokens that an engine which keeps its word cannot exceed, over all answers that it writes."""
    maximum = requested_tokens if requested_tokens is not None else card.context_tokens
    return MAX_OUTPUT_TOKENS if maximum is None else maximum * answers


def _choice_count(wire: ChatCompletionRequest | CompletionRequest) -> int:
    """How many answers are written, those that are not shown among them."""
    best_of = wire.best_of if isinstance(wire, CompletionRequest) else None
    return max(wire.n or 1, best_of or 1)


def _prompt_hash(wire: ChatCompletionRequest | CompletionRequest, size: int) -> str:
    """Equal for equal prompts to one model, however the rest of the bodies differs. `size` is that of the whole body.

    A hint for grouping, not a proof of identity: a checksum, and of something long only of its ends and its length.
    """
    found = crc32(wire.model.encode())
    if isinstance(wire, CompletionRequest):
        found = _checksum(wire.prompt, found)
    elif size <= 2 * HASHED_TAIL_BYTES:  # and so is all that is in it
        for message in wire.messages:
            found = crc32(message.content, (found + len(message.role)) & 0xFFFFFFFF)
    else:
        for message in wire.messages:
            found = _checksum(message.content, found + len(message.role))
    return f"{found:08x}"


def _checksum(raw: Raw, crc: int) -> int:
    view = memoryview(raw)
    if len(view) <= 2 * HASHED_TAIL_BYTES:
        return crc32(view, crc & 0xFFFFFFFF)
    crc = crc32(b"%d" % len(view), crc & 0xFFFFFFFF)
    return crc32(view[-HASHED_TAIL_BYTES:], crc32(view[:HASHED_TAIL_BYTES], crc))


def _sanitize(name: str) -> str:
    """A name a client sent, short and printable enough to be repeated."""
    return "".join(char if char.isprintable() else "?" for char in name[:64])
