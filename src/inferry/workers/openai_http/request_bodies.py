"""Request bodies for the server: the client's body with added fields, or a continuation from token ids."""

import hashlib
import os
from collections.abc import Set
from typing import Final

import msgspec
from msgspec import Raw

from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.lanes import Lane
from inferry.workers.openai_http.settings import ChoicesOption, KvTransfer, TextPart, TokenIdsOption

PRIORITIES: Final = {Lane.P0: b',"priority":-1', Lane.P1: b',"priority":0', Lane.P2: b',"priority":1'}
"""Lower is first. Sent with every call, so that a client's own value is overridden."""
RETURN_TOKEN_IDS: Final = b',"return_token_ids":true'

RESUMED_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("allowed_token_ids", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "user"),
)
"""Fields that a continuation copies from the client's body: sampling and stop conditions. The gateway matches stop
strings (`resumed_stop_strings`)."""

NOT_RESUMABLE_FIELDS = (
    *(b'"bad_words"', b'"logits_processors"', b'"thinking_token_budget"', b'"repetition_detection"', b'"vllm_xargs"'),
    *(b'"use_beam_search"', b'"kv_transfer_params"'),
)
"""Fields that depend on the output so far, or that a continuation cannot carry."""

OUTPUT_LIMITS: Final = frozenset({"max_tokens", "max_completion_tokens", "min_tokens"})
"""Fields for the output limit, which a budget overrides."""

STREAM_FIELDS: Final = frozenset({"stream", "stream_options"})
PREFILL_FIELDS: Final = (
    b',"ignore_eos":true,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""Asks vLLM to keep the KV of the prompt for another server, which it does where the output limit ends the request and
no stop condition. Connectors that share a store need no such field."""
NOT_IN_PREFILLS: Final = frozenset({"stream", "stream_options", "stop", "stop_token_ids", "ignore_eos"})

MAX_SALTS: Final = 10_000

_STREAM: Final = b',"stream":true}'
_STREAM_AND_USAGE: Final = b',"stream":true,"stream_options":{"include_usage":true}}'
_USAGE: Final = b',"stream_options":{"include_usage":true}}'

_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_messages_decoder: Final = msgspec.json.Decoder(list[dict[str, Raw]])


_token_ids_option_decoder: Final = msgspec.json.Decoder(TokenIdsOption)
_choices_decoder: Final = msgspec.json.Decoder(ChoicesOption)
_kv_transfer_decoder: Final = msgspec.json.Decoder(KvTransfer)


class CacheSalts:
    """A salt per tenant that other tenants cannot guess: a hash keyed with a secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32).digest()
        self._cache: dict[str, bytes] = {}

    @classmethod
    def from_secret(cls, secret: str | None) -> "CacheSalts":
        """Without a secret, salts that no other process makes."""
        return cls(os.urandom(32) if secret is None else secret.encode())

    def field(self, tenant: str, own: str | None = None) -> bytes:
        """The salt as a field after a comma. The client's `own` salt separates the tenant's caches further."""
        if own:
            return b',"cache_salt":"%b"' % self.salt(f"{tenant}\n{own}").encode()
        found = self._cache.get(tenant)
        if found is None:
            if len(self._cache) >= MAX_SALTS:
                self._cache.clear()  # clients may choose tenant names, so the cache is bounded
            found = self._cache[tenant] = b',"cache_salt":"%b"' % self.salt(tenant).encode()
        return found

    def salt(self, tenant: str) -> str:
        return hashlib.blake2b(tenant.encode(), key=self._key, digest_size=16).hexdigest()


def streaming_body(
    body: bytes,
    names: tuple[bool, bool] | None,
    streams: bool,
    extra: bytes = b"",
    *,
    drop: Set[str] = frozenset(),
    with_usage: bool = True,
    output_cap: int | None = None,
) -> tuple[bytes | memoryview, bytes]:
    """The client's body with streaming and usage enabled, in parts. The prompt is neither decoded nor copied.

    `names`: whether the body has the fields `stream` and `stream_options`; None where unknown. `streams`: whether it
    asks for a stream. `extra`: added fields, each after a comma; the last of two equal fields counts. `drop`: fields
    to remove. `output_cap` replaces the client's output limit.
    """
    if output_cap is not None:
        # Rare, when a budget is nearly exhausted: the body is re-encoded without its own limit.
        extra += _limit_fields(body, output_cap)
        drop = drop | OUTPUT_LIMITS
    if names is None:
        # Quotes inside strings are escaped, so without this substring neither field is there unless its name is
        # written with escapes. Added fields come last, because the last of two equal fields counts.
        names = (True, True) if b'"stream' in body else (False, False)
    if names[1] or names[0] > streams or (drop and _mentions_any(body, drop)):
        written = _rewrite(body, drop, with_usage)
        return (written[:-1], extra + b"}") if extra else (written, b"")
    end = (_USAGE if names[0] else _STREAM_AND_USAGE) if with_usage else (b"}" if names[0] else _STREAM)
    return memoryview(body)[: body.rindex(b"}")], extra + end


def non_streaming_body(
    body: bytes, extra: bytes, *, drop: Set[str] = frozenset(), output_cap: int | None = None
) -> tuple[bytes | memoryview, bytes]:
    """The client's body for a non-streaming response."""
    if output_cap is not None:
        extra += _limit_fields(body, output_cap)
        drop = drop | OUTPUT_LIMITS
    if drop and _mentions_any(body, drop):
        body = msgspec.json.encode(
            {name: raw for name, raw in _fields_decoder.decode(body).items() if name not in drop}
        )
    return memoryview(body)[: body.rindex(b"}")], extra + b"}"


def with_max_tokens(body: bytes, default: int) -> bytes:
    """The body with its output limit as `max_tokens`, for a server that ignores the newer name or has a default."""
    fields = _fields_decoder.decode(body)
    newer = _to_int(fields.pop("max_completion_tokens", None))
    limit = newer or _to_int(fields.get("max_tokens")) or default
    fields["max_tokens"] = Raw(b"%d" % limit)
    return msgspec.json.encode(fields)


def with_plain_messages(body: bytes) -> bytes:
    """The body of a chat with contents as text and without the role `developer`, which some servers do not know."""
    fields = _fields_decoder.decode(body)
    messages = _messages_decoder.decode(fields["messages"])
    for message in messages:
        if bytes(message["role"]) == b'"developer"':
            message["role"] = Raw(b'"system"')
        content = bytes(message.get("content", b""))
        if content.startswith(b"["):
            parts = msgspec.json.decode(content, type=list[TextPart])
            if all(part.type == "text" for part in parts):
                message["content"] = Raw(msgspec.json.encode("".join(part.text for part in parts)))
    fields["messages"] = Raw(msgspec.json.encode(messages))
    return msgspec.json.encode(fields)


def resumed_body(job: InferenceJob, resume_point: ResumePoint, max_new_tokens: int, extra: bytes) -> bytes:
    """A body for /v1/completions that continues the output so far by at most `max_new_tokens` tokens."""
    given = _fields_decoder.decode(job.payload.body)
    fields: dict[str, Raw] = {"model": Raw(msgspec.json.encode(job.route.model))}
    for name in RESUMED_FIELDS:
        value = given.get(name)
        if value is not None and bytes(value) != b"null":
            fields[name] = value
    min_tokens = _to_int(given.get("min_tokens")) or 0
    if min_tokens > len(resume_point.output_ids):
        fields["min_tokens"] = Raw(b"%d" % min(max_new_tokens, min_tokens - len(resume_point.output_ids)))
    fields["prompt"] = Raw(msgspec.json.encode(resume_point.prompt_ids + resume_point.output_ids))
    fields["max_tokens"] = Raw(b"%d" % max_new_tokens)
    return msgspec.json.encode(fields)[:-1] + extra + RETURN_TOKEN_IDS + _STREAM_AND_USAGE


def remaining_tokens(job: InferenceJob, resume_point: ResumePoint, context_tokens: int | None) -> int:
    """Tokens that the job may still write. Without a limit it may fill the context."""
    given = _fields_decoder.decode(job.payload.body)
    requested = job.payload.output_cap
    if requested is None:
        requested = _to_int(given.get("max_completion_tokens")) or _to_int(given.get("max_tokens"))
    context_left = None
    if context_tokens is not None:
        context_left = context_tokens - len(resume_point.prompt_ids) - len(resume_point.output_ids)
    if requested is None and job.payload.api == "chat" and context_left is not None:
        return context_left
    max_new_tokens = (job.token_budget if requested is None else min(requested, job.token_budget)) - len(
        resume_point.output_ids
    )
    return max_new_tokens if context_left is None else min(max_new_tokens, context_left)


def requests_token_ids(body: bytes) -> bool:
    """Whether the client itself asked for token ids."""
    if b'"return_token_ids"' not in body:
        return False
    try:
        return _token_ids_option_decoder.decode(body).return_token_ids is True
    except msgspec.MsgspecError:
        return False


def is_not_resumable(body: bytes) -> bool:
    """Whether the body has a field that prevents an exact resume. Quotes inside strings are escaped."""
    return any(name in body for name in NOT_RESUMABLE_FIELDS)


def is_single_choice(body: bytes) -> bool:
    try:
        return _choices_decoder.decode(body).n in (None, 1)
    except msgspec.MsgspecError:
        return False


def kv_transfer_of(response: bytes) -> bytes | None:
    """What the response of a prefill says about fetching its KV, as JSON; None where it says nothing."""
    try:
        params = _kv_transfer_decoder.decode(response).kv_transfer_params
    except msgspec.MsgspecError:
        return None
    return bytes(params) if bytes(params).startswith(b"{") else None


def _limit_fields(body: bytes, cap: int) -> bytes:
    """The output limit as fields after a comma, under the name that the client used."""
    name = b"max_completion_tokens" if b'"max_completion_tokens"' in body else b"max_tokens"
    fields = b',"%b":%d' % (name, cap)
    min_tokens = _to_int(_fields_decoder.decode(body).get("min_tokens")) if b'"min_tokens"' in body else None
    return fields if min_tokens is None else fields + b',"min_tokens":%d' % min(min_tokens, cap)


def _mentions_any(body: bytes, names: Set[str]) -> bool:
    return any(name.encode() in body for name in names)


def _rewrite(body: bytes, drop: Set[str], with_usage: bool) -> bytes:
    fields = {name: value for name, value in _fields_decoder.decode(body).items() if name not in drop}
    fields["stream"] = Raw(b"true")
    options: dict[str, Raw] = {}
    given = fields.pop("stream_options", None)
    if given is not None and bytes(given) != b"null":
        options = _fields_decoder.decode(given)
    if with_usage:
        options["include_usage"] = Raw(b"true")
        fields["stream_options"] = Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)


def _to_int(raw: Raw | None) -> int | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=int | None)
    except msgspec.MsgspecError:
        return None


def request_id(job: InferenceJob) -> str:
    """The request id for the server. Every attempt has its own."""
    return job.job_id if job.attempt == 1 else f"{job.job_id}-{job.attempt}"


def engine_id(job: InferenceJob) -> str:
    """The id that vLLM's engine derives from it."""
    request_name = request_id(job)
    is_chat = job.payload.api == "chat" and job.resume_point is None
    return f"chatcmpl-{request_name}" if is_chat else f"cmpl-{request_name}-0"
