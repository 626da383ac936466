"""`POST /v1/completions`: one job for each prompt of a call, one response for all of them.

All jobs of a call are admitted, or none. Each is queued, placed, shared and cancelled on its own.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import Caller
from inferry.domain.errors import ClientClosed, GatewayError, InvalidRequest
from inferry.domain.jobs import InferenceJob
from inferry.domain.values import replace
from inferry.ingress.auth import Auth
from inferry.ingress.http.limits import HttpLimits
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.job_ids import JOB_ID
from inferry.ingress.job_parser import INLINE_TOKENIZE_BYTES, LongPrompt, parse
from inferry.ingress.openai.decode import decode_completion
from inferry.ingress.openai.merged_reply import MergedReply
from inferry.ingress.openai.prompt_list import PromptList, read_prompt_list
from inferry.ingress.response import HeartbeatTimer, start_response
from inferry.ingress.wire_format import OPENAI, ClientRequest, DeferredRequest, Endpoint
from inferry.observe.tracing.tracer import Tracer

Refuse = Callable[[GatewayError, Request, Reply, Caller], None]

PROMPTS_AT_A_TIME: Final = 16
"""Prompts that become jobs before the event loop serves other work."""


class CompletionsEndpoint(Endpoint):
    format = OPENAI

    def __init__(
        self,
        gateway: Gateway,
        limits: HttpLimits,
        heartbeats: HeartbeatTimer,
        auth: Auth,
        refuse: Refuse,
        tracer: Tracer | None = None,
    ) -> None:
        self.gateway = gateway
        self.limits = limits
        self.heartbeats = heartbeats
        self.auth = auth
        self.refuse = refuse
        self.tracer = tracer

    def decode(self, body: bytes) -> ClientRequest | DeferredRequest:
        wire = decode_completion(body)
        limits = self.limits
        prompts = read_prompt_list(wire, body, limits.max_prompts, limits.max_body_bytes)
        return ClientRequest(wire, body, OPENAI) if prompts is None else PromptCall(prompts, self)


class PromptCall(DeferredRequest):
    """A call with several prompts."""

    def __init__(self, prompts: PromptList, endpoint: CompletionsEndpoint) -> None:
        self._prompts = prompts
        self._endpoint = endpoint

    async def prepare(self, request: Request, reply: Reply, caller: Caller) -> None:
        endpoint = self._endpoint
        gateway = endpoint.gateway
        check_limits(caller, len(self._prompts))
        with gateway.reserved_bytes(self._prompts.total_bytes):
            jobs = await self._jobs(request.headers, caller)
            if (waiting := gateway.lineages.pending(jobs[0], caller)) is not None:
                await waiting()  # all jobs have the same run, or the same parent
        if reply.is_disconnected:
            raise ClientClosed("the client disconnected before its prompts were read")
        if not request.is_internal:
            caller = endpoint.auth.caller(request.headers, reply.peer)  # the key may have been revoked meanwhile
        if endpoint.tracer is not None and request.trace is not None:
            for job in jobs:
                endpoint.tracer.adopt(request.trace, job)
        try:
            streams = gateway.submit_all(jobs, caller)
        except GatewayError as error:
            endpoint.refuse(error, request, reply, caller)
            return
        unread = endpoint.limits.max_unread_bytes
        parts = MergedReply(reply, jobs, gateway.cancel, unread).start()
        for job, stream, part in zip(jobs, streams, parts, strict=True):
            start_response(stream, job, gateway, part, OPENAI, endpoint.heartbeats, unread, caller)

    async def _jobs(self, headers: Mapping[bytes, bytes], caller: Caller) -> list[InferenceJob]:
        """A job for each prompt. All have the request id of the first."""
        jobs: list[InferenceJob] = []
        models = self._endpoint.gateway.models
        unyielded_bytes = 0
        for index, one in enumerate(self._prompts.requests()):
            unyielded_bytes += len(one.body)
            if index % PROMPTS_AT_A_TIME == 0 or unyielded_bytes > INLINE_TOKENIZE_BYTES:
                unyielded_bytes = 0
                await asyncio.sleep(0)
            try:
                parsed = parse(one, _headers_of(index, headers, jobs), models, caller)
                job = await parsed.job() if isinstance(parsed, LongPrompt) else parsed
            except GatewayError as error:
                if error.param == "prompt":
                    error.param = f"prompt[{index}]"
                    error.message = error.message.replace("`prompt`", f"`prompt[{index}]`")
                raise
            jobs.append(_repeatable(job, index))
        return jobs


def check_limits(caller: Caller, prompts: int) -> None:
    """Refuse a call with more prompts than the caller's limits can ever admit at once: a retry would not help."""
    if caller.tenant.shadow:
        return
    for limits in (caller.tenant.limits, None if caller.key is None else caller.key.limits):
        if limits is None:
            continue
        for name, most in (
            ("max_concurrent", limits.max_concurrent),
            ("requests_per_minute", limits.requests_per_minute),
        ):
            if most is not None and prompts > most:
                raise InvalidRequest(f"`prompt` has {prompts} prompts; `{name}` allows {most}", param="prompt")


def _headers_of(index: int, headers: Mapping[bytes, bytes], jobs: list[InferenceJob]) -> Mapping[bytes, bytes]:
    if index == 0:
        return headers
    found = {**headers, b"x-request-id": jobs[0].request_id.encode()}
    if (job_id := headers.get(JOB_ID)) is not None:
        found[JOB_ID] = b"%b-%d" % (job_id, index)
    return found


def _repeatable(job: InferenceJob, index: int) -> InferenceJob:
    """The job with a name of its own for repetitions. Identifiers have no spaces, so the name is unique."""
    repeat = job.repeat
    if repeat is None or repeat.name is None:
        return job
    return replace(job, repeat=replace(repeat, name=f"{repeat.name} {index}"))
