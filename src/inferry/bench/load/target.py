"""The server under load: whether it is there, whether it has the model, and what its requests may look like."""

from collections.abc import Iterator
from uuid import uuid4

from msgspec import Struct

from inferry.adapters.workers.http1 import Client
from inferry.bench.load.player import Call, Limits, Player
from inferry.bench.load.requests import Form, Prompts, RequestMaker, Telling
from inferry.bench.target import NoSuchModel, NotAllowed, ProbeError, Refused, Server
from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.sim.calls import Run, Step

TRIAL_TIMEOUT_S = 60.0
SHORT_TRIAL, LONG_TRIAL, TRIAL_OUTPUT = 64, 192, 4
CONNECT_TIMEOUT_S = 30.0
_OTHERWISE = ("http 400", "http 404", "http 405", "http 422")
"""Refusals that another form of request may be spared."""


class Target(Struct, frozen=True, kw_only=True):
    """A server that answers. `context_tokens`: the longest prompt and answer together, where it says so."""

    model: str
    server: str | None
    context_tokens: int | None
    form: Form


async def find_target(
    url: str, model: str | None, key: str | None, client: Client, telling: Telling, prompts: Prompts | None
) -> Target:
    """Ask the server what it is, and try calls until one is answered. Raises ProbeError with words for a person."""
    server = Server(url, key)
    try:
        name, context = await _model(server, model)
        version = await server.version()
    finally:
        server.close()
    form = await _form(server.url, client, name, telling, prompts)
    return Target(model=name, server=version, context_tokens=context, form=form)


async def _model(server: Server, wanted: str | None) -> tuple[str, int | None]:
    try:
        models = await server.models()
    except NotAllowed:
        raise NotAllowed(f"{server.url} wants a key, or another one: --api-key, or INFERRY_API_KEY") from None
    except Refused:
        if wanted is None:
            raise
        return wanted, None  # a server need not list its models
    if wanted is None:
        if len(models) != 1:
            raise NoSuchModel(f"{server.url} serves {len(models)} models; name one with --model: {', '.join(models)}")
        wanted = next(iter(models))
    elif wanted not in models:
        raise NoSuchModel(f"{server.url} has no model {wanted}; it serves {', '.join(models) or 'none'}")
    return wanted, models[wanted]


def _forms(prompts: Prompts | None) -> Iterator[Form]:
    """From what says most to what says least."""
    for kind in ("ids", "text", "chat") if prompts is None else (prompts,):
        for usage in (True, False):
            for end in ("ignore_eos", "min_tokens", ""):
                yield Form(kind, usage, end)


async def _form(url: str, client: Client, model: str, telling: Telling, prompts: Prompts | None) -> Form:
    refusal = ""
    for form in _forms(prompts):
        trial = await _trial(client, model, form, telling, SHORT_TRIAL)
        if trial.outcome == "done":
            if form.prompts == "ids":
                return form
            return replace(form, words_per_token=await _words_per_token(client, model, form, telling, trial))
        refusal = refusal or f"{trial.outcome} {trial.detail}".strip()
        if not trial.outcome.startswith(_OTHERWISE) and not trial.outcome.endswith("too early"):
            break
    raise Refused(f"{url} did not answer a short call to {model}: {refusal}")


async def _words_per_token(client: Client, model: str, form: Form, telling: Telling, short: Call) -> float:
    """What a template adds is left out by looking at two lengths."""
    long = await _trial(client, model, form, telling, LONG_TRIAL)
    if short.told_prompt is None or long.told_prompt is None or long.told_prompt <= short.told_prompt:
        return 1.0
    return (LONG_TRIAL - SHORT_TRIAL) / (long.told_prompt - short.told_prompt)


async def _trial(client: Client, model: str, form: Form, telling: Telling, tokens: int) -> Call:
    step = Step("trial", ((tokens, 0, tokens),), TRIAL_OUTPUT)
    # Where lanes are told as priorities, one that is not the default: servers refuse those they cannot keep.
    lane = Lane.P0 if telling.lane_by == "priority" else Lane.P1
    run = Run(run_id="trial", tenant="bench", lane=lane, at=0.0, steps=(step,))
    requests = RequestMaker(client, model, form, telling, uuid4().hex)
    player = Player(client, requests, Limits(patience_s=TRIAL_TIMEOUT_S))
    await player.play([run], lead_s=0.0)
    return player.calls[0]


__all__ = ["CONNECT_TIMEOUT_S", "ProbeError", "Target", "find_target"]
