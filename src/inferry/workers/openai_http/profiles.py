"""What each kind of OpenAI-compatible server can do beyond the plain API.

A profile is the most that is believed of a kind. What a server shows at its start narrows it and never widens it; an
ability that is not certain of a kind is left off.
"""

from msgspec import Struct

from inferry.domain.values import replace

ALL_FEATURES = frozenset(
    {"n", "logit_bias", "penalties", "min_p", "min_tokens", "structured_outputs", "logprobs", "tools", "audio"}
    | {"echo", "suffix"}
)


class MetricNames(Struct, frozen=True, kw_only=True):
    """How a kind calls its samples on `path`; None where it has none. Counters and histograms without their suffixes.

    `kv_usage` is the part of the cache in use, `kv_capacity` its size in tokens; `cache_info` is a sample whose labels
    hold that size. `step_tokens` is a histogram of the tokens computed in one step,
    `output_tokens` counts those written.
    """

    path: bytes = b"/metrics"
    running: bytes
    waiting: bytes
    kv_usage: bytes | None = None
    kv_capacity: bytes | None = None
    cache_info: bytes | None = None
    prefix_queries: bytes | None = None
    prefix_hits: bytes | None = None
    preemptions: bytes | None = None
    step_tokens: bytes | None = None
    output_tokens: bytes | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """The abilities of one kind.

    `can_resume`: takes prompts as token ids on /v1/completions and returns the ids of prompt and output on request.
    `cache_salts`: keeps the prefix caches of different `cache_salt`s apart. `supports_priority`: takes a `priority`,
    lower first. `abort_path`: where requests are aborted by id. `detokenize_path`: where ids are turned into text.
    `usage_in_stream`: takes `stream_options.include_usage`. `is_hosted`: tells in headers how much more it takes.
    `unsupported_fields` are fields of other kinds that it must not be sent.
    """

    kind: str
    can_resume: bool = False
    cache_salts: bool = False
    supports_priority: bool = False
    abort_path: bytes | None = None
    detokenize_path: bytes | None = None
    metrics: MetricNames | None = None
    usage_in_stream: bool = True
    is_hosted: bool = False
    unsupported_fields: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()


VLLM = Profile(
    kind="vllm",
    can_resume=True,
    cache_salts=True,
    supports_priority=True,
    abort_path=b"/abort_requests",
    detokenize_path=b"/detokenize",
    metrics=MetricNames(
        running=b"vllm:num_requests_running",
        waiting=b"vllm:num_requests_waiting",
        kv_usage=b"vllm:kv_cache_usage_perc",
        cache_info=b"vllm:cache_config_info",
        prefix_queries=b"vllm:prefix_cache_queries_total",
        prefix_hits=b"vllm:prefix_cache_hits_total",
        preemptions=b"vllm:num_preemptions_total",
        step_tokens=b"vllm:iteration_tokens_total",
        output_tokens=b"vllm:generation_tokens_total",
    ),
    features=ALL_FEATURES | {"prompt_logprobs", "beam_search"},
)

SGLANG = Profile(
    kind="sglang",
    metrics=MetricNames(
        running=b"sglang:num_running_reqs",
        waiting=b"sglang:num_queue_reqs",
        kv_usage=b"sglang:token_usage",
        kv_capacity=b"sglang:max_total_num_tokens",
    ),
    features=ALL_FEATURES - {"audio", "suffix"},
)

TGI = Profile(
    kind="tgi",
    metrics=MetricNames(running=b"tgi_batch_current_size", waiting=b"tgi_queue_size"),
    features=frozenset({"penalties", "structured_outputs", "logprobs", "tools"}),
)

TRTLLM = Profile(
    kind="trtllm",
    features=frozenset({"n", "penalties", "min_p", "min_tokens", "structured_outputs", "logprobs", "tools"}),
)

HOSTED = Profile(
    kind="openai",
    is_hosted=True,
    unsupported_fields=frozenset({"cache_salt", "priority", "return_token_ids"}),
    features=frozenset({"n", "logit_bias", "penalties", "structured_outputs", "logprobs", "tools", "audio"}),
)

PROFILES = {profile.kind: profile for profile in (VLLM, SGLANG, TGI, TRTLLM, HOSTED)}


class DetectedCapabilities(Struct, frozen=True, kw_only=True):
    """What a server has shown of itself: True or False where it was asked, None where nobody did."""

    returns_token_ids: bool | None = None
    accepts_priority: bool | None = None
    supports_abort: bool | None = None
    has_metrics: bool | None = None


def restrict_profile(profile: Profile, capabilities: DetectedCapabilities) -> Profile:
    """The profile without what the server has shown not to do."""
    return replace(
        profile,
        can_resume=profile.can_resume and capabilities.returns_token_ids is not False,
        supports_priority=profile.supports_priority and capabilities.accepts_priority is not False,
        abort_path=None if capabilities.supports_abort is False else profile.abort_path,
        metrics=None if capabilities.has_metrics is False else profile.metrics,
    )
