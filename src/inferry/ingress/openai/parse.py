"""A request's body and headers to an InferenceJob, or to the GatewayError that names what is wrong."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from msgspec import UNSET, UnsetType

from inferry.dispatch.gateway import ModelCatalog
from inferry.domain.callers import Caller
from inferry.domain.constraints import Constraint
from inferry.domain.errors import (
    InvalidRequest,
    ModelNotAllowed,
    ModelNotFound,
    UnsupportedFeature,
)
from inferry.domain.jobs import Estimate, InferenceJob, Payload, ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.ports import ModelCard
from inferry.domain.routes import BatchKey, RouteKey, Task
from inferry.domain.sampling import Sampling
from inferry.ingress.errors import printable
from inferry.ingress.harness import identity
from inferry.ingress.headers import identifier, int_header, lane_of, request_id, tier_of
from inferry.ingress.idempotency import IDEMPOTENCY_KEY, parse_idempotency
from inferry.ingress.job_ids import composed_of, job_id_of
from inferry.ingress.openai.constraints import constraint_of
from inferry.ingress.openai.decode import Api, check_ranges
from inferry.ingress.openai.features import check_fields, features_of
from inferry.ingress.openai.media import NO_MEDIA, Media, media_of
from inferry.ingress.openai.output_tokens import choice_count, output_budget, output_limit
from inferry.ingress.openai.prompt import PromptText, completion_prompt, read_prompt
from inferry.ingress.openai.prompt_hash import prompt_hash
from inferry.ingress.openai.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from inferry.ingress.wire_format import ClientRequest

MIN_PREDICTED_TOKENS = 32
"""A job with a smaller budget is assumed to write all of it."""
INLINE_TOKENIZE_BYTES = 8192
"""Longer prompts are tokenised off the event loop."""
_RESUMABLE_FEATURES = frozenset(
    {"min_p", "min_tokens", "logit_bias", "repetition_penalty", "prefill", "reasoning_effort"}
)
"""Features, or fields of them, with the same effect when output so far becomes part of the prompt. A repetition penalty
counts prompt and output alike; the other penalties count the output alone and are not resumable."""
_NON_STREAMING_FEATURES = frozenset({"prompt_logprobs", "beam_search", "echo", "chat_echo"})
"""Features that streams lack, or support only in part."""
GREEDY_BELOW_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy sampling: dividing by them would overflow."""

# Few threads, so that several long prompts at once leave processor time for other calls.
_tokenizer_pool = ThreadPoolExecutor(2, thread_name_prefix="tokenise")


def parse(
    request: ClientRequest, headers: Mapping[bytes, bytes], models: ModelCatalog, caller: Caller
) -> "InferenceJob | LongPrompt":
    """The job of a request, or the text of a long prompt."""
    wire = request.wire
    api: Api = "chat" if isinstance(wire, ChatCompletionRequest) else "completions"
    card = find_card(wire.model, models, caller)
    requested_tokens = check_ranges(wire)
    media = NO_MEDIA if isinstance(wire, CompletionRequest) else media_of(wire.messages)
    features = check_features(request, card, media)
    body = body_for(request, card)
    if body is not request.body:
        features.append(("reasoning_effort", "reasoning_effort"))
    tokenizer = models.tokenizer(card.name)
    constraint = None if tokenizer is None or not features else _constraint(features, body)
    call = _ParsedCall(api, wire, requested_tokens, features, constraint, body, media, headers, card, models, caller)
    prompt = read_prompt(wire, body, card, tokenizer)
    if prompt is None:
        template_id = identifier(headers, b"x-inferry-template-id")
        text_size = len(body) - media.size
        size = models.estimator.prompt(caller.tenant.name, card.name, template_id, text_size)
        if media.items:
            size = size.plus(media.items * card.media_tokens)
        return _job(call, None, size)
    if isinstance(prompt, PromptText):
        if prompt.size > INLINE_TOKENIZE_BYTES:
            return LongPrompt(prompt.encode, partial(_job_from_ids, call))
        prompt = prompt.encode()
    return _job_from_ids(call, prompt)


def find_card(model: str, models: ModelCatalog, caller: Caller, task: Task = Task.GENERATE) -> ModelCard:
    """The card of the model that the caller names. Raises ModelNotFound, ModelNotAllowed, or UnsupportedFeature where
    the model does not do the task.
    """
    card = models.card(model, caller.pool)
    if card is None:
        raise ModelNotFound(f"unknown model `{printable(model)}`", param="model")
    if not caller.allows_model(card.name):
        raise ModelNotAllowed(f"this key may not use the model `{card.name}`", param="model")
    if task not in card.tasks:
        tasks = ", ".join(sorted(one.value for one in card.tasks))
        raise UnsupportedFeature(
            f"the model `{card.name}` does not support the task `{task.value}`, only {tasks}", param="model"
        )
    return card


def body_for(request: ClientRequest, card: ModelCard) -> bytes:
    """The body that workers of the model are sent."""
    if request.reasoning and "reasoning_effort" in card.features:
        return b"%b%b}" % (request.body[:-1], request.reasoning)
    return request.body


def check_features(request: ClientRequest, card: ModelCard, media: Media = NO_MEDIA) -> list[tuple[str, str]]:
    """(feature, parameter) for every feature that the request uses. Raises UnsupportedFeature."""
    features = features_of(request.wire)
    if request.features:
        features += request.features
    if media.items:
        features += media.features
    for feature, param in features:
        if feature not in card.features:
            raise UnsupportedFeature(f"`{param}` is not supported by the model `{card.name}`", param=param)
    if card.fields is not None:
        check_fields(request.wire, request.body, card.fields, card.name)
    return features


async def tokenize_long(prompt: PromptText) -> list[int]:
    """Token ids of a prompt, computed off the event loop."""
    ids: list[int] = await run_tokenizer(prompt.encode)
    return ids


async def run_tokenizer(encode: Callable[[], Any]) -> Any:
    """The result of `encode`, computed off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_tokenizer_pool, encode)


class _ParsedCall:
    """A request, validated except for the length of its prompt."""

    def __init__(
        self,
        api: Api,
        wire: ChatCompletionRequest | CompletionRequest,
        requested_tokens: int | None,
        features: list[tuple[str, str]],
        constraint: Constraint | None,
        body: bytes,
        media: Media,
        headers: Mapping[bytes, bytes],
        card: ModelCard,
        models: ModelCatalog,
        caller: Caller,
    ) -> None:
        self.api: Final = api
        self.wire: Final = wire
        self.requested_tokens: Final = requested_tokens
        self.features: Final = features
        self.constraint: Final = constraint
        self.body: Final = body
        self.media: Final = media
        self.headers: Final = headers
        self.card: Final = card
        self.models: Final = models
        self.caller: Final = caller
        self.now: Final = models.now()


class LongPrompt:
    """A call whose prompt is tokenised off the event loop: `encode` runs there, `make_job` gets its result."""

    def __init__(self, encode: Callable[[], Any], make_job: Callable[[Any], InferenceJob]) -> None:
        self._encode = encode
        self._make_job = make_job

    async def job(self) -> InferenceJob:
        return self._make_job(await run_tokenizer(self._encode))


def _job_from_ids(call: _ParsedCall, ids: list[int]) -> InferenceJob:
    if not ids:
        raise InvalidRequest("the prompt is empty", param="messages" if call.api == "chat" else "prompt")
    return _job(call, tuple(ids), Estimate.exactly(len(ids)), _echo(call, ids) if call.wire.echo else "")


def _echo(call: _ParsedCall, ids: list[int]) -> str:
    """The prompt as text, for workers that return only what they generate. Others write it themselves."""
    tokenizer = call.models.tokenizer(call.card.name)
    if tokenizer is None or not isinstance(call.wire, CompletionRequest):
        return ""
    prompt = completion_prompt(call.wire.prompt)
    return prompt if isinstance(prompt, str) else tokenizer.decode(ids)


def _job(call: _ParsedCall, prompt_ids: tuple[int, ...] | None, prompt: Estimate, echo: str = "") -> InferenceJob:
    wire, body, headers, card, models, caller = call.wire, call.body, call.headers, call.card, call.models, call.caller
    template_id = identifier(headers, b"x-inferry-template-id")
    budget = output_budget(call.requested_tokens, prompt, card, call.api)
    lane = lane_of(headers, wire.service_tier, caller)
    job_id = job_id_of(headers)
    run = identity(headers, job_id)
    step_named = None if run.step_id == job_id else run.step_id
    hint = int_header(headers, b"x-inferry-expected-output-tokens")
    tenant = caller.tenant.name
    is_fixed = budget <= MIN_PREDICTED_TOKENS or wire.ignore_eos is True
    footprint, prefix = models.estimator.footprint(
        tenant, card.name, body, prompt, budget, is_output_fixed=is_fixed, template=template_id, hint=hint
    )
    max_wait_ms = int_header(headers, b"x-inferry-max-wait-ms")
    deadline_ms = int_header(headers, b"x-inferry-deadline-ms")
    stream = wire.stream is True
    length = models.output_length(lane, footprint.output.expected)
    route = RouteKey(card.name, caller.precision, card.name if card.parent else None, caller.pool, length=length)
    return InferenceJob(
        job_id=job_id,
        request_id=request_id(headers) or job_id,
        tenant=tenant,
        key_id=None if caller.key is None else caller.key.key_id,
        run_id=run.run_id,
        step_id=step_named or identifier(headers, IDEMPOTENCY_KEY) or job_id,
        parent_run=run.parent_run,
        session=wire.prompt_cache_key or run.session or wire.user,
        salted=caller.tenant.isolation != "none",
        template_id=template_id,
        composed=composed_of(headers),
        lane=lane,
        route=route,
        batch_key=BatchKey(route, streaming=stream),
        footprint=footprint,
        prefix=prefix,
        output_hint=hint,
        token_budget=budget,
        prompt_hash=prompt_hash(wire, len(body)),
        arrived_at=call.now,
        max_wait_s=(models.max_wait_ms(lane) if max_wait_ms is None else max_wait_ms) / 1000,
        deadline=None if deadline_ms is None else call.now + deadline_ms / 1000,
        stream=stream,
        resume=_resume(wire, call.features, card, lane, models),
        features=tuple([feature for feature, _ in call.features]) if call.features else (),
        repeat=parse_idempotency(headers, None if run.run_id == job_id else run.run_id, step_named),
        payload=_payload(call, lane, budget, prompt_ids, echo),
        ttft_allowance_s=models.ttft_allowance_s(
            lane, footprint, int_header(headers, b"x-inferry-ttft-ms-per-1k-tokens")
        ),
    )


def _payload(call: _ParsedCall, lane: Lane, budget: int, prompt_ids: tuple[int, ...] | None, echo: str) -> Payload:
    wire, card, features = call.wire, call.card, call.features
    return Payload(
        api=call.api,
        body=call.body,
        sampling=_sampling(wire, budget, call.constraint),
        prompt_ids=prompt_ids,
        include_usage=_includes_usage(wire.stream_options),
        output_limit=output_limit(call.requested_tokens, choice_count(wire), card),
        stream_fields=(wire.stream is not UNSET, wire.stream_options is not UNSET),
        choices=wire.n or 1,
        service_tier=None if wire.service_tier is None else tier_of(lane),
        context_tokens=card.context_tokens,
        non_streaming=wire.stream is not True and any(feature in _NON_STREAMING_FEATURES for feature, _ in features),
        echo=echo,
        media_bytes=call.media.size,
        cache_salt=wire.cache_salt,
    )


def _includes_usage(options: StreamOptions | UnsetType | None) -> bool:
    return isinstance(options, StreamOptions) and options.include_usage is True


def _resume(
    wire: ChatCompletionRequest | CompletionRequest,
    features: list[tuple[str, str]],
    card: ModelCard,
    lane: Lane,
    models: ModelCatalog,
) -> ResumeMode:
    """Whether another worker can resume the job after its first token: where that is exact, and of use."""
    if not models.can_resume(card, lane):
        return ResumeMode.RESTART
    if features and any(
        feature not in _RESUMABLE_FEATURES
        and param not in _RESUMABLE_FEATURES
        and not (feature == "structured_outputs" and card.can_resume_constrained)
        for feature, param in features
    ):
        return ResumeMode.RESTART
    is_sampled = wire.temperature is None or wire.temperature >= GREEDY_BELOW_TEMPERATURE
    # A seed asks for one particular sample, and most engines start a new random sequence when they resume.
    return (
        ResumeMode.RESTART
        if wire.seed is not None and is_sampled and not card.can_resume_seeded
        else ResumeMode.CONTINUE
    )


def _constraint(features: list[tuple[str, str]], body: bytes) -> Constraint | None:
    """What the output must match, where the prompt is tokenised here. Other workers read the body."""
    return constraint_of(body) if any(feature in ("structured_outputs", "tools") for feature, _ in features) else None


def _sampling(wire: GenerationRequest, budget: int, constraint: Constraint | None) -> Sampling:
    temperature, top_p, top_k, stop = wire.temperature, wire.top_p, wire.top_k, wire.stop
    if stop:
        stop = [stop] if isinstance(stop, str) else stop
    return Sampling(
        temperature=1.0 if temperature is None else 0.0 if temperature < GREEDY_BELOW_TEMPERATURE else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        seed=wire.seed,
        max_tokens=budget,
        stop=tuple(stop) if stop else (),
        stop_token_ids=tuple(wire.stop_token_ids) if wire.stop_token_ids else (),
        ignore_eos=bool(wire.ignore_eos),
        constraint=constraint,
    )
