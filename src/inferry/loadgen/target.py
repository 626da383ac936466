"""The server under load: its model, and the form of requests that it accepts."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from uuid import uuid4

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.loadgen.load_generator import Call, ClientLimits, LoadGenerator
from inferry.loadgen.requests import Prompts, RequestForm, RequestMaker, RequestMetadata
from inferry.loadgen.server import NoSuchModel, NotAllowed, Refused, Server
from inferry.sim.calls import Run, Step
from inferry.workers.http_client import Client

TRIAL_TIMEOUT_S = 60.0
SHORT_TRIAL_TOKENS, LONG_TRIAL_TOKENS, TRIAL_OUTPUT_TOKENS = 64, 192, 4
CONNECT_TIMEOUT_S = 30.0
_OTHER_FORM_STATUSES = ("http 400", "http 404", "http 405", "http 422")
"""Statuses after which another form of request is tried."""


class Target(Struct, frozen=True, kw_only=True):
    """A server that answers. `context_tokens`: the model's context length, if known."""

    model: str
    server: str | None
    context_tokens: int | None
    form: RequestForm


@asynccontextmanager
async def open_target(
    url: str, model: str | None, key: str | None, request_metadata: RequestMetadata, prompts: Prompts | None
) -> AsyncIterator[tuple[Client, Target]]:
    """A client of the server, closed at the end, and what was found. Raises ProbeError."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    client = Client(url.rstrip("/").removesuffix("/v1"), headers, CONNECT_TIMEOUT_S)
    try:
        yield client, await find_target(url, model, key, client, request_metadata, prompts)
    finally:
        client.close()


async def find_target(
    url: str,
    model: str | None,
    key: str | None,
    client: Client,
    request_metadata: RequestMetadata,
    prompts: Prompts | None,
) -> Target:
    """Query the server and try forms of requests until one is answered. Raises ProbeError."""
    server = Server(url, key)
    try:
        name, context = await _model(server, model)
        version = await server.version()
    finally:
        server.close()
    form = await _form(server.url, client, name, request_metadata, prompts)
    return Target(model=name, server=version, context_tokens=context, form=form)


async def _model(server: Server, wanted: str | None) -> tuple[str, int | None]:
    try:
        models = await server.models()
    except NotAllowed:
        raise NotAllowed(f"{server.url} wants a key, or another one: --api-key, or INFERRY_API_KEY") from None
    except Refused:
        if wanted is None:
            raise
        return wanted, None  # a server may not list its models
    if wanted is None:
        if len(models) != 1:
            raise NoSuchModel(f"{server.url} serves {len(models)} models; name one with --model: {', '.join(models)}")
        wanted = next(iter(models))
    elif wanted not in models:
        raise NoSuchModel(f"{server.url} has no model {wanted}; it serves {', '.join(models) or 'none'}")
    return wanted, models[wanted]


def _forms(prompts: Prompts | None) -> Iterator[RequestForm]:
    """Forms of requests, from the most to the least informative."""
    for kind in ("ids", "text", "chat") if prompts is None else (prompts,):
        for usage in (True, False):
            for end in ("ignore_eos", "min_tokens", ""):
                yield RequestForm(kind, usage, end)


async def _form(
    url: str, client: Client, model: str, request_metadata: RequestMetadata, prompts: Prompts | None
) -> RequestForm:
    refusal = ""
    for form in _forms(prompts):
        trial = await _trial(client, model, form, request_metadata, SHORT_TRIAL_TOKENS)
        if trial.outcome == "done":
            if form.prompts == "ids":
                return form
            return replace(form, words_per_token=await _words_per_token(client, model, form, request_metadata, trial))
        refusal = refusal or f"{trial.outcome} {trial.detail}".strip()
        if not trial.outcome.startswith(_OTHER_FORM_STATUSES) and not trial.outcome.endswith("too early"):
            break
    raise Refused(f"{url} did not answer a short call to {model}: {refusal}")


async def _words_per_token(
    client: Client, model: str, form: RequestForm, request_metadata: RequestMetadata, short: Call
) -> float:
    """Words per token, from two lengths, so that the template's tokens cancel out."""
    long = await _trial(client, model, form, request_metadata, LONG_TRIAL_TOKENS)
    if (
        short.reported_prompt_tokens is None
        or long.reported_prompt_tokens is None
        or long.reported_prompt_tokens <= short.reported_prompt_tokens
    ):
        return 1.0
    return (LONG_TRIAL_TOKENS - SHORT_TRIAL_TOKENS) / (long.reported_prompt_tokens - short.reported_prompt_tokens)


async def _trial(client: Client, model: str, form: RequestForm, request_metadata: RequestMetadata, tokens: int) -> Call:
    step = Step("trial", ((tokens, 0, tokens),), TRIAL_OUTPUT_TOKENS)
    # With lanes as priorities, a value other than the default: some servers refuse those.
    lane = Lane.P0 if request_metadata.lane_by == "priority" else Lane.P1
    run = Run(run_id="trial", tenant="bench", lane=lane, at=0.0, steps=(step,))
    requests = RequestMaker(client, model, form, request_metadata, uuid4().hex)
    load_generator = LoadGenerator(client, requests, ClientLimits(call_timeout_s=TRIAL_TIMEOUT_S))
    await load_generator.play([run], lead_s=0.0)
    return load_generator.calls[0]
