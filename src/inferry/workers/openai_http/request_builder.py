"""HTTP requests for the calls of one server, according to its profile."""

from collections.abc import Mapping

from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import Lane
from inferry.workers.http_client import Client, Request
from inferry.workers.openai_http.calls import Call
from inferry.workers.openai_http.profiles import Profile
from inferry.workers.openai_http.request_bodies import (
    NOT_IN_PREFILLS,
    PREFILL_FIELDS,
    RETURN_TOKEN_IDS,
    STREAM_FIELDS,
    CacheSalts,
    non_streaming_body,
    remaining_tokens,
    request_id,
    resumed_body,
    streaming_body,
    with_max_tokens,
    with_plain_messages,
)
from inferry.workers.openai_http.server_queries import PATHS
from inferry.workers.openai_http.silent_refusals import SilentRefusalCall
from inferry.workers.openai_http.upstream_keys import UpstreamKeys


class RequestBuilder:
    """`priorities` maps lanes to the body field that tells the engine; `contexts` has the context tokens per model.
    `takes_kv`: the engine fetches KV from prefill workers."""

    __slots__ = ("_client", "_contexts", "_keys", "_priorities", "_profile", "_salts", "_takes_kv")

    def __init__(
        self,
        client: Client,
        keys: UpstreamKeys,
        profile: Profile,
        salts: CacheSalts | None,
        priorities: Mapping[Lane, bytes],
        contexts: Mapping[str, int | None],
        takes_kv: bool,
    ) -> None:
        self._client = client
        self._keys = keys
        self._profile = profile
        self._salts = salts
        self._priorities = priorities
        self._contexts = contexts
        self._takes_kv = takes_kv

    def remaining_tokens(self, job: InferenceJob) -> int:
        """Output tokens left for a job that resumes."""
        assert job.resume_point is not None
        return remaining_tokens(job, job.resume_point, self._contexts.get(job.route.model))

    def build(self, call: Call) -> Request:
        job, profile = call.job, self._profile
        payload = job.payload
        headers = self._keys.header(call.key)
        if profile.takes_request_ids:
            headers = b"x-request-id: %b\r\n%b" % (request_id(job).encode(), headers)
        if job.trace is not None:
            headers += job.trace.headers(job.attempt)
        more = self._priorities.get(job.lane, b"")
        if self._salts is not None and job.salted:
            more = self._salts.field(job.tenant, payload.cache_salt) + more
        if job.resume_point is not None:
            body = resumed_body(job, job.resume_point, self.remaining_tokens(job), more)
            return self._client.request(b"POST", PATHS["completions"], headers, body)
        if job.prefill is not None:
            if job.route.role == "prefill":
                drop = profile.unsupported_fields | NOT_IN_PREFILLS
                prompt = non_streaming_body(payload.body, more + PREFILL_FIELDS, drop=drop, output_cap=1)
                return self._client.request(b"POST", PATHS[payload.api], headers, *prompt)
            if self._takes_kv and job.prefill.kv_transfer is not None:
                more += b',"kv_transfer_params":' + job.prefill.kv_transfer
        sent = payload.body
        if profile.plain_messages and payload.api == "chat":
            sent = with_plain_messages(sent)
        if profile.takes_max_tokens_only:
            sent = with_max_tokens(sent, job.token_budget)
            if isinstance(call, SilentRefusalCall) and call.asks_why:
                asked = non_streaming_body(sent, more, drop=profile.unsupported_fields | STREAM_FIELDS, output_cap=1)
                return self._client.request(b"POST", PATHS[payload.api], headers, *asked)
        if payload.non_streaming:
            whole = non_streaming_body(sent, more, drop=profile.unsupported_fields, output_cap=payload.output_cap)
            return self._client.request(b"POST", PATHS[payload.api], headers, *whole)
        if job.resume is ResumeMode.CONTINUE and profile.can_resume:
            more += RETURN_TOKEN_IDS
        parts = streaming_body(
            sent,
            payload.stream_fields,
            job.stream,
            more,
            drop=profile.unsupported_fields,
            with_usage=profile.usage_in_stream,
            output_cap=payload.output_cap,
        )
        return self._client.request(b"POST", PATHS[payload.api], headers, *parts)
