"""A request of a pooled API and its headers to an InferenceJob, or to the GatewayError that refuses it."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple
from zlib import crc32

from inferry.dispatch.gateway import ModelCatalog
from inferry.domain.callers import Caller
from inferry.domain.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from inferry.domain.jobs import Estimate, InferenceJob, Payload, PooledInputs
from inferry.domain.ports import ModelCard, PairTokenizer, Tokenizer
from inferry.domain.routes import BatchKey, Task
from inferry.domain.sampling import Sampling
from inferry.ingress.headers import identifier, int_header, lane_of, request_id
from inferry.ingress.idempotency import IDEMPOTENCY_KEY, parse_idempotency
from inferry.ingress.job_ids import composed_of, job_id_of
from inferry.ingress.job_parser import INLINE_TOKENIZE_BYTES, LongPrompt, find_card
from inferry.ingress.openai.decode import MAX_TOKEN_ID
from inferry.ingress.pooling.decode import PooledRequest
from inferry.ingress.pooling.request_schema import EmbeddingRequest
from inferry.ingress.run_identity import identity

_SAMPLING = Sampling(temperature=0.0, max_tokens=0)
"""Equal inputs have equal results, so equal calls may share an execution."""

_APIS: dict[Task, Literal["embeddings", "score", "classify"]] = {
    Task.EMBED: "embeddings",
    Task.SCORE: "score",
    Task.CLASSIFY: "classify",
}

Sequences = list[list[int]]


class PooledCall(NamedTuple):
    """A request, validated except for the length of its inputs."""

    request: PooledRequest
    headers: Mapping[bytes, bytes]
    card: ModelCard
    models: ModelCatalog
    caller: Caller
    now: float
    uses_similarity: bool


def parse_pooled(
    request: PooledRequest, headers: Mapping[bytes, bytes], models: ModelCatalog, caller: Caller
) -> InferenceJob | LongPrompt:
    """The job of a request, or its texts where they are long."""
    card = find_card(request.wire.model, models, caller, request.task)
    for field in request.features:
        if field not in card.features:
            raise UnsupportedFeature(f"`{field}` is not supported by the model `{card.name}`", param=field)
    uses_similarity = request.task is Task.SCORE and Task.EMBED in card.tasks
    call = PooledCall(request, headers, card, models, caller, models.now(), uses_similarity)
    tokenizer = models.tokenizer(card.name)
    if request.inputs and not isinstance(request.inputs[0], str):
        ids: Sequences = request.inputs
        _check_ids(ids, card)
        return _job_from_ids(call, ids)
    if tokenizer is None:
        return _job_from_size(call)
    encode = partial(encode_inputs, request, uses_similarity, tokenizer)
    if len(request.body) > INLINE_TOKENIZE_BYTES:
        check_sizes(call, tokenizer.longest_token_bytes)
        return LongPrompt(encode, partial(_job_from_ids, call))
    return _job_from_ids(call, encode())


def encode_inputs(request: PooledRequest, uses_similarity: bool, tokenizer: Tokenizer) -> Sequences:
    """Token ids of every sequence: of every text, or of every pair for a model with a head of its own."""
    texts: list[str] = request.inputs  # type: ignore[assignment]
    if request.task is not Task.SCORE or uses_similarity:
        return [tokenizer.encode(text) for text in (*texts, *request.others)]
    assert isinstance(tokenizer, PairTokenizer), "an engine with a classification head has one"
    firsts = texts if len(texts) > 1 else texts * len(request.others)
    return [tokenizer.encode_pair(a, b) for a, b in zip(firsts, request.others, strict=True)]


def _check_ids(sequences: Sequences, card: ModelCard) -> None:
    max_id = MAX_TOKEN_ID if card.vocab_size is None else card.vocab_size - 1
    for index, ids in enumerate(sequences):
        if ids and (min(ids) < 0 or max(ids) > max_id):
            param = f"input[{index}]"
            raise InvalidRequest(f"`{param}` has a token id outside 0 to {max_id}", param=param)


def _job_from_ids(call: PooledCall, sequences: Sequences) -> InferenceJob:
    ids = fitting_ids(call, sequences)
    return _job(call, tuple(ids), Estimate.exactly(sum(len(one) for one in ids)))


def fitting_ids(call: PooledCall, sequences: Sequences) -> list[tuple[int, ...]]:
    """Refuses inputs that are empty or exceed the context, unless the call asks to truncate them."""
    limit, context = call.request.wire.truncate_prompt_tokens, call.card.context_tokens
    if limit is not None:
        limit = context if limit == -1 else limit
        sequences = [ids[:limit] for ids in sequences]
    for index, ids in enumerate(sequences):
        if not ids:
            param = _param(call, index)
            raise InvalidRequest(f"`{param}` is empty", param=param)
        if context is not None and len(ids) > context:
            raise _too_long(call, index, f"{len(ids)}")
    return [tuple(ids) for ids in sequences]


def _job_from_size(call: PooledCall) -> InferenceJob:
    """A job whose worker tokenises, and refuses inputs that are too long: its tokens are estimated from its bytes."""
    request, models = call.request, call.models
    template = identifier(call.headers, b"x-inferry-template-id")
    size = len(request.body)
    return _job(call, None, models.estimate_prompt(call.caller.tenant.name, call.card.name, template, size))


def check_sizes(call: PooledCall, longest_token_bytes: int) -> None:
    """Refuse a text that cannot fit the context, before time is spent on tokenising it."""
    context = call.card.context_tokens
    if context is None or call.request.wire.truncate_prompt_tokens is not None:
        return
    for index, text in enumerate((*call.request.inputs, *call.request.others)):
        least = len(str(text).encode()) // longest_token_bytes
        if least > context:
            raise _too_long(call, index, f"at least {least}")


def _too_long(call: PooledCall, index: int, tokens: str) -> ContextLengthExceeded:
    param = _param(call, index)
    context = call.card.context_tokens
    return ContextLengthExceeded(
        f"`{param}` has {tokens} tokens; the context of `{call.card.name}` is {context} tokens", param=param
    )


def _param(call: PooledCall, index: int) -> str:
    """The client's name of a sequence: of a text, or of the second text of a pair."""
    request = call.request
    first, second = request.params
    if request.task is Task.SCORE and not call.uses_similarity:
        return f"{second}[{index}]"
    if index < len(request.inputs):
        return "query" if first == "query" else f"{first}[{index}]"
    return f"{second}[{index - len(request.inputs)}]"


def pooled_inputs(call: PooledCall, ids: tuple[tuple[int, ...], ...] | None) -> PooledInputs:
    request = call.request
    firsts, seconds = len(request.inputs), len(request.others)
    if request.task is not Task.SCORE:
        dimensions = request.wire.dimensions if isinstance(request.wire, EmbeddingRequest) else None
        return PooledInputs(firsts, ids, None, dimensions)
    if ids is None or not call.uses_similarity:
        return PooledInputs(seconds, ids)
    pairs = tuple([(index if firsts > 1 else 0, firsts + index) for index in range(seconds)])
    return PooledInputs(seconds, ids, pairs)


def _job(call: PooledCall, ids: tuple[tuple[int, ...], ...] | None, prompt: Estimate) -> InferenceJob:
    request, headers, card, models, caller, now, _ = call
    wire = request.wire
    lane = lane_of(headers, wire.service_tier, caller)
    job_id = job_id_of(headers)
    run = identity(headers, job_id)
    step_named = None if run.step_id == job_id else run.step_id
    max_wait_ms = int_header(headers, b"x-inferry-max-wait-ms")
    deadline_ms = int_header(headers, b"x-inferry-deadline-ms")
    step_id = step_named or identifier(headers, IDEMPOTENCY_KEY) or job_id
    template_id = identifier(headers, b"x-inferry-template-id")
    ttft_ms_per_1k = int_header(headers, b"x-inferry-ttft-ms-per-1k-tokens")
    repeat = parse_idempotency(headers, None if run.run_id == job_id else run.run_id, step_named)
    resolved = models.resolve(caller, card, lane, prompt, max_wait_ms=max_wait_ms, ttft_ms_per_1k=ttft_ms_per_1k)
    is_salted = caller.tenant.isolation != "none"
    group = f"{caller.tenant.name} {request.options}" if is_salted else request.options
    return InferenceJob(
        job_id=job_id,
        request_id=request_id(headers) or job_id,
        tenant=caller.tenant.name,
        key_id=None if caller.key is None else caller.key.key_id,
        run_id=run.run_id,
        step_id=step_id,
        parent_run=run.parent_run,
        session=run.session or wire.user,
        salted=is_salted,
        template_id=template_id,
        composed=composed_of(headers),
        features=request.features,
        lane=lane,
        is_batch=resolved.is_batch,
        route=resolved.route,
        batch_key=BatchKey(resolved.route, task=request.task, group=group),
        footprint=resolved.footprint,
        token_budget=0,
        prompt_hash=f"{crc32(request.body):08x}",
        arrived_at=now,
        ttft_allowance_s=resolved.ttft_allowance_s,
        max_wait_s=resolved.max_wait_s,
        deadline=None if deadline_ms is None else now + deadline_ms / 1000,
        repeat=repeat,
        payload=Payload(
            api=_APIS[request.task],
            body=request.body,
            sampling=_SAMPLING,
            output_limit=0,
            non_streaming=True,
            pooled=pooled_inputs(call, ids),
            cache_salt=wire.cache_salt,
        ),
    )
