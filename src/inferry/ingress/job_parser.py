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
from inferry.domain.routes import BatchKey, Task
from inferry.domain.sampling import Sampling
from inferry.ingress.errors import printable
from inferry.ingress.headers import identifier, int_header, lane_of, request_id, tier_of
from inferry.ingress.idempotency import IDEMPOTENCY_KEY, parse_idempotency
from inferry.ingress.job_ids import composed_of, job_id_of
from inferry.ingress.openai.constraints import constraint_of
from inferry.ingress.openai.decode import Api, check_ranges
from inferry.ingress.openai.features import check_fields, features_of
from inferry.ingress.openai.logprobs import requested_logprobs
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
from inferry.ingress.run_identity import identity
from inferry.ingress.wire_format import ClientRequest

INLINE_TOKENIZE_BYTES: Final = 8192
"""Longer prompts are tokenised off the event loop."""
_RESUMABLE_FEATURES: Final = frozenset(
    {"min_p", "min_tokens", "logit_bias", "repetition_penalty", "prefill", "reasoning_effort"}
    | {"include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "truncate_prompt_tokens"}
    | {"chat_template", "chat_template_kwargs", "documents"}
)
"""Features, or fields of them, with the same effect when output so far becomes part of the prompt. A repetition penalty
counts prompt and output alike; the other penalties count the output alone and are not resumable. A prompt that was
rendered or cut is known by its token ids."""
_NON_STREAMING_FEATURES: Final = frozenset({"prompt_logprobs", "beam_search", "echo", "chat_echo", "suffix"})
"""Features that streams lack, or support only in part."""
GREEDY_BELOW_TEMPERATURE: Final = 1e-5
"""Lower temperatures mean greedy sampling: dividing by them would overflow."""

MAX_LISTED_MODELS: Final = 5
"""Models that the error of an unknown model names."""

# Few threads, so that several long prompts at once leave processor time for other calls.
_tokenizer_pool: Final = ThreadPoolExecutor(2, thread_name_prefix="tokenise")


def parse(
    request: ClientRequest, headers: Mapping[bytes, bytes], models: ModelCatalog, caller: Caller
) -> "InferenceJob | LongPrompt":
    """The job of a request, or the text of a long prompt."""
    call = _ParsedCall(request, headers, models, caller)
    card, media = call.card, call.media
    prompt = read_prompt(call.wire, call.body, card, call.tokenizer)
    if prompt is None:
        template_id = identifier(headers, b"x-inferry-template-id")
        size = models.estimate_prompt(caller.tenant.name, card.name, template_id, len(call.body) - media.size)
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
        raise ModelNotFound(f"unknown model `{printable(model)}`{_usable_models(models, caller, task)}", param="model")
    if not caller.allows_model(card.name):
        raise ModelNotAllowed(f"this key may not use the model `{card.name}`", param="model")
    if task not in card.tasks:
        tasks = ", ".join(sorted(one.value for one in card.tasks))
        raise UnsupportedFeature(
            f"the model `{card.name}` does not support the task `{task.value}`, only {tasks}", param="model"
        )
    return card


def _usable_models(models: ModelCatalog, caller: Caller, task: Task) -> str:
    """A few models that the caller may use for the task, for the error of an unknown one."""
    if not caller.may_list_models:
        return ""
    cards = models.cards(caller.pool)
    found: list[str] = []
    for name, card in cards.items():
        if task in card.tasks and caller.allows_model(name):
            if len(found) == MAX_LISTED_MODELS:
                found.append("…")
                break
            found.append(f"`{name}`")
    return f"; models of this gateway: {', '.join(found)}" if found else ""


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
        self, request: ClientRequest, headers: Mapping[bytes, bytes], models: ModelCatalog, caller: Caller
    ) -> None:
        wire = request.wire
        api: Api = "chat" if isinstance(wire, ChatCompletionRequest) else "completions"
        card = find_card(wire.model, models, caller)
        self.wire: Final = wire
        self.headers: Final = headers
        self.models: Final = models
        self.caller: Final = caller
        self.card: Final = card
        self.api: Final = api
        self.requested_tokens: Final = check_ranges(wire)
        self.media: Final = NO_MEDIA if isinstance(wire, CompletionRequest) else media_of(wire.messages)
        self.features: Final = check_features(request, card, self.media)
        self.body: Final = body_for(request, card)
        if self.body is not request.body:
            self.features.append(("reasoning_effort", "reasoning_effort"))
        self.feature_names: Final = tuple([feature for feature, _ in self.features])
        self.tokenizer: Final = models.tokenizer(card.name)
        has_options = self.tokenizer is not None and len(self.features) > 0
        self.constraint: Final = _constraint(self.features, self.body) if has_options else None
        self.logprobs: Final = requested_logprobs(wire) if has_options else None
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
    if call.tokenizer is None or not isinstance(call.wire, CompletionRequest):
        return ""
    prompt = completion_prompt(call.wire.prompt)
    return prompt if isinstance(prompt, str) else call.tokenizer.decode(ids)


def _job(call: _ParsedCall, prompt_ids: tuple[int, ...] | None, prompt: Estimate, echo: str = "") -> InferenceJob:
    wire, body, headers, card, caller = call.wire, call.body, call.headers, call.card, call.caller
    template_id = identifier(headers, b"x-inferry-template-id")
    budget = output_budget(call.requested_tokens, prompt, card, call.api)
    lane = lane_of(headers, wire.service_tier, caller)
    job_id = job_id_of(headers)
    run = identity(headers, job_id)
    step_named = None if run.step_id == job_id else run.step_id
    hint = int_header(headers, b"x-inferry-expected-output-tokens")
    max_wait_ms = int_header(headers, b"x-inferry-max-wait-ms")
    deadline_ms = int_header(headers, b"x-inferry-deadline-ms")
    step_id = step_named or identifier(headers, IDEMPOTENCY_KEY) or job_id
    repeat = parse_idempotency(headers, None if run.run_id == job_id else run.run_id, step_named)
    stream = wire.stream is True
    resolved = call.models.resolve(
        caller,
        card,
        lane,
        prompt,
        max_wait_ms=max_wait_ms,
        ttft_ms_per_1k=int_header(headers, b"x-inferry-ttft-ms-per-1k-tokens"),
        body=body,
        budget=budget,
        ignore_eos=wire.ignore_eos is True,
        template=template_id,
        hint=hint,
    )
    return InferenceJob(
        job_id=job_id,
        request_id=request_id(headers) or job_id,
        tenant=caller.tenant.name,
        key_id=None if caller.key is None else caller.key.key_id,
        run_id=run.run_id,
        step_id=step_id,
        parent_run=run.parent_run,
        session=wire.prompt_cache_key or run.session or wire.user,
        salted=caller.tenant.isolation != "none",
        template_id=template_id,
        composed=composed_of(headers),
        lane=lane,
        is_batch=resolved.is_batch,
        route=resolved.route,
        batch_key=BatchKey(resolved.route, streaming=stream),
        footprint=resolved.footprint,
        prefix=resolved.prefix,
        output_hint=hint,
        token_budget=budget,
        prompt_hash=prompt_hash(wire, len(body)),
        arrived_at=call.now,
        max_wait_s=resolved.max_wait_s,
        deadline=None if deadline_ms is None else call.now + deadline_ms / 1000,
        stream=stream,
        resume=_resume(wire, call.features, card) if resolved.can_resume else ResumeMode.RESTART,
        features=call.feature_names,
        repeat=repeat,
        payload=_payload(call, lane, budget, prompt_ids, echo),
        ttft_allowance_s=resolved.ttft_allowance_s,
    )


def _payload(call: _ParsedCall, lane: Lane, budget: int, prompt_ids: tuple[int, ...] | None, echo: str) -> Payload:
    wire, card, features = call.wire, call.card, call.features
    return Payload(
        api=call.api,
        body=call.body,
        sampling=_sampling(wire, budget, call.constraint, call.logprobs),
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
    wire: ChatCompletionRequest | CompletionRequest, features: list[tuple[str, str]], card: ModelCard
) -> ResumeMode:
    """How the job continues where its worker can resume a job without features: only where that is exact."""
    if features and any(
        feature not in _RESUMABLE_FEATURES
        and param not in _RESUMABLE_FEATURES
        and not (feature == "structured_outputs" and card.can_resume_constrained)
        and not (feature == "logprobs" and card.can_resume_logprobs)
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


def _sampling(wire: GenerationRequest, budget: int, constraint: Constraint | None, logprobs: int | None) -> Sampling:
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
        logprobs=logprobs,
    )
