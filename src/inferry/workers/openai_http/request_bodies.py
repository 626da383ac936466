"""The bodies that go upstream: the client's with fields of our own at its end, or a continuation of token ids."""

import hashlib
from collections.abc import Set

import msgspec
from msgspec import Raw

from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.lanes import Lane
from inferry.workers.openai_http.settings import ChoicesOption, TokenIdsOption

PRIORITIES = {Lane.P0: b',"priority":-1', Lane.P1: b',"priority":0', Lane.P2: b',"priority":1'}
"""Lower goes first. Sent with every call, so that no client chooses its own."""
RETURN_TOKEN_IDS = b',"return_token_ids":true'

RESUMED_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("allowed_token_ids", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "user"),
)
"""What a continuation takes over from the client's body: how tokens are chosen, and when to stop. Stop strings are
looked for by the gateway (`stop_strings`)."""

NOT_RESUMABLE_FIELDS = (
    *(b'"bad_words"', b'"logits_processors"', b'"thinking_token_budget"', b'"repetition_detection"', b'"vllm_xargs"'),
    *(b'"use_beam_search"', b'"kv_transfer_params"'),
)
"""Fields under which an engine looks at what it wrote itself, or at nothing that a continuation could be sent."""

OUTPUT_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "min_tokens"})
"""What a client may say about how much is written, and a budget overrules."""

MAX_SALTS = 10_000

_STREAM = b',"stream":true}'
_STREAM_AND_USAGE = b',"stream":true,"stream_options":{"include_usage":true}}'
_USAGE = b',"stream_options":{"include_usage":true}}'

_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


_token_ids_option_decoder = msgspec.json.Decoder(TokenIdsOption)
_choices_decoder = msgspec.json.Decoder(ChoicesOption)


class CacheSalts:
    """A salt per tenant that no tenant can guess of another: a hash keyed with a secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32).digest()
        self._cache: dict[str, bytes] = {}

    def field(self, tenant: str) -> bytes:
        """The salt as a field after a comma."""
        found = self._cache.get(tenant)
        if found is None:
            if len(self._cache) >= MAX_SALTS:
                self._cache.clear()  # tenants may be whatever clients write
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
    """The client's body with streaming and usage switched on, in parts. The prompt is neither decoded nor copied.

    `names` says whether the body has the fields `stream` and `stream_options`, where somebody knows; `streams` whether
    it asks for a stream. `extra` are fields of our own, each after a comma: coming last they count, whatever the client
    wrote. Fields in `drop` do not go upstream. `output_cap` takes the place of what the client says about the length.
    """
    if output_cap is not None:
        # Rarely, when a budget is nearly used up: then a body that names a limit is written anew, without it.
        extra += _limit_fields(body, output_cap)
        drop = drop | OUTPUT_LIMITS
    if names is None:
        # Quotes inside strings are escaped, so without this neither field is there in plain writing. In disguise it
        # may be: what is added comes last, because the last of two equal fields counts.
        names = (True, True) if b'"stream' in body else (False, False)
    if names[1] or names[0] > streams or (drop and _mentions_any(body, drop)):
        written = _rewrite(body, drop, with_usage)
        return (written[:-1], extra + b"}") if extra else (written, b"")
    end = (_USAGE if names[0] else _STREAM_AND_USAGE) if with_usage else (b"}" if names[0] else _STREAM)
    return memoryview(body)[: body.rindex(b"}")], extra + end


def non_streaming_body(
    body: bytes, extra: bytes, *, drop: Set[str] = frozenset(), output_cap: int | None = None
) -> tuple[bytes | memoryview, bytes]:
    """The client's body, to be answered in one piece: nothing about streaming is added."""
    if output_cap is not None:
        extra += _limit_fields(body, output_cap)
        drop = drop | OUTPUT_LIMITS
    if drop and _mentions_any(body, drop):
        body = msgspec.json.encode(
            {name: raw for name, raw in _fields_decoder.decode(body).items() if name not in drop}
        )
    return memoryview(body)[: body.rindex(b"}")], extra + b"}"


def resumed_body(job: InferenceJob, resume_point: ResumePoint, max_new_tokens: int, extra: bytes) -> bytes:
    """A call of /v1/completions that goes on after the output so far, for at most `max_new_tokens` tokens."""
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
    """How many more tokens a job may write. One that named no limit may go to the end of the context."""
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
    """Whether the client itself wants to see token ids."""
    if b'"return_token_ids"' not in body:
        return False
    try:
        return _token_ids_option_decoder.decode(body).return_token_ids is True
    except msgspec.MsgspecError:
        return False


def is_not_resumable(body: bytes) -> bool:
    """Whether the body names something that cannot be continued exactly. Quotes inside strings are escaped."""
    return any(name in body for name in NOT_RESUMABLE_FIELDS)


def is_single_choice(body: bytes) -> bool:
    try:
        return _choices_decoder.decode(body).n in (None, 1)
    except msgspec.MsgspecError:
        return False


def _limit_fields(body: bytes, cap: int) -> bytes:
    """The length that is left, each field after a comma, under the name that the client uses."""
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
    """What the server is to call the request. Another attempt is another request."""
    return job.job_id if job.attempt == 1 else f"{job.job_id}-{job.attempt}"


def engine_id(job: InferenceJob) -> str:
    """What vLLM's engine makes of it."""
    request_name = request_id(job)
    is_chat = job.payload.api == "chat" and job.resume_point is None
    return f"chatcmpl-{request_name}" if is_chat else f"cmpl-{request_name}-0"
