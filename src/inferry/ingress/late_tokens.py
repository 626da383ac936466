"""Tokenizes jobs of an ingress process that has no tokenizer for their model, or another one than the owner.

The job gets what the parser would have given it: token ids, the exact size of its prompt, its budget, and what the
engine reads from the job instead of from the body.
"""

from functools import partial
from typing import Final

from inferry.dispatch.gateway import ModelCatalog
from inferry.domain.callers import Caller
from inferry.domain.jobs import Estimate, InferenceJob, Payload
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.tenants import Tenant
from inferry.domain.values import replace
from inferry.ingress.job_parser import run_tokenizer
from inferry.ingress.openai.constraints import constraint_of
from inferry.ingress.openai.decode import Api, ChatEndpoint, check_ranges, decode_completion
from inferry.ingress.openai.logprobs import requested_logprobs
from inferry.ingress.openai.output_tokens import output_budget
from inferry.ingress.openai.prompt import PromptText, completion_prompt, read_prompt
from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest
from inferry.ingress.pooling.late_tokens import tokenize_pooled

_READ_HERE: Final = frozenset({"structured_outputs", "tools", "logprobs", "echo"})
"""Features that the parser reads for engines that take token ids."""
_chat: Final = ChatEndpoint()


def lacks_tokens(job: InferenceJob, models: ModelCatalog) -> bool:
    """Whether the job's engine takes token ids, and the job lacks them or what is read together with them."""
    payload = job.payload
    if models.tokenizer(job.route.model) is None:
        return False
    if payload.pooled is not None:
        return payload.pooled.ids is None
    if job.resume_point is None and payload.prompt_ids is None:
        return True
    if not job.features or payload.echo or payload.sampling.constraint is not None:
        return False
    return payload.sampling.logprobs is None and not _READ_HERE.isdisjoint(job.features)


async def tokenized(job: InferenceJob, models: ModelCatalog) -> InferenceJob:
    """The job with what it lacks, computed off the event loop. Raises GatewayError."""
    model = job.route.model
    card, tokenizer = models.card(model, job.route.isolation), models.tokenizer(model)
    if card is None or tokenizer is None:
        return job  # the model has just left: the job is refused as every job for it
    if job.payload.pooled is not None:
        caller = Caller(Tenant(name=job.tenant))
        found = await run_tokenizer(partial(tokenize_pooled, job, card, models, caller, tokenizer))
    else:
        found = await run_tokenizer(partial(_tokenize, job, card, tokenizer))
    assert isinstance(found, InferenceJob)
    return found


def _tokenize(job: InferenceJob, card: ModelCard, tokenizer: Tokenizer) -> InferenceJob:
    payload = job.payload
    body = payload.body
    wire = _chat.decode(body).wire if payload.api == "chat" else decode_completion(body)
    ids = payload.prompt_ids
    if ids is None and job.resume_point is None:
        prompt = read_prompt(wire, body, card, tokenizer)
        ids = tuple(prompt.encode() if isinstance(prompt, PromptText) else prompt or ())
    has_options = bool(job.features)
    sampling = replace(
        payload.sampling,
        constraint=constraint_of(body) if has_options else None,
        logprobs=requested_logprobs(wire) if has_options else None,
    )
    if ids is None:
        return replace(job, payload=replace(payload, sampling=sampling))
    return _with_ids(job, card, wire, replace(payload, sampling=sampling, prompt_ids=ids), tokenizer)


def _with_ids(
    job: InferenceJob,
    card: ModelCard,
    wire: ChatCompletionRequest | CompletionRequest,
    payload: Payload,
    tokenizer: Tokenizer,
) -> InferenceJob:
    prompt = Estimate.exactly(len(payload.prompt_ids or ()))
    api: Api = "chat" if payload.api == "chat" else "completions"
    # The job's own budget may be what is left of a ceiling.
    budget = min(job.token_budget, output_budget(check_ranges(wire), prompt, card, api))
    sampling = replace(payload.sampling, max_tokens=min(payload.sampling.max_tokens, budget))
    return replace(
        job,
        footprint=replace(job.footprint, prompt=prompt),
        token_budget=budget,
        payload=replace(payload, sampling=sampling, echo=_echo(wire, payload, tokenizer)),
    )


def _echo(wire: ChatCompletionRequest | CompletionRequest, payload: Payload, tokenizer: Tokenizer) -> str:
    """The prompt as text, where the call asks for it."""
    if not isinstance(wire, CompletionRequest) or not wire.echo:
        return ""
    prompt = completion_prompt(wire.prompt)
    return prompt if isinstance(prompt, str) else tokenizer.decode(payload.prompt_ids or ())
