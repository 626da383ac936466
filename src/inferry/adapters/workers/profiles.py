"""What each kind of OpenAI-compatible server can do beyond the plain API.

A profile is the most that is believed of a kind. What a server shows at its start narrows it and never widens it; an
ability that is not certain of a kind is left off.
"""

from msgspec import Struct

from inferry.domain.values import replace

EVERY_FEATURE = frozenset(
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

    `continues`: takes prompts as token ids on /v1/completions and returns the ids of prompt and output on request.
    `salts`: keeps the prefix caches of different `cache_salt`s apart. `orders`: takes a `priority`, lower first.
    `abort_path`: where requests are aborted by id. `detokenize_path`: where ids are turned into text.
    `usage_in_stream`: takes `stream_options.include_usage`. `is_hosted`: tells in headers how much more it takes.
    `refuses` are fields of other kinds that it must not be sent.
    """

    kind: str
    continues: bool = False
    salts: bool = False
    orders: bool = False
    abort_path: bytes | None = None
    detokenize_path: bytes | None = None
    metrics: MetricNames | None = None
    usage_in_stream: bool = True
    is_hosted: bool = False
    refuses: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()


VLLM = Profile(
    kind="vllm",
    continues=True,
    salts=True,
    orders=True,
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
    features=EVERY_FEATURE | {"prompt_logprobs", "beam_search"},
)

SGLANG = Profile(
    kind="sglang",
    metrics=MetricNames(
        running=b"sglang:num_running_reqs",
        waiting=b"sglang:num_queue_reqs",
        kv_usage=b"sglang:token_usage",
        kv_capacity=b"sglang:max_total_num_tokens",
    ),
    features=EVERY_FEATURE - {"audio", "suffix"},
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
    refuses=frozenset({"cache_salt", "priority", "return_token_ids"}),
    features=frozenset({"n", "logit_bias", "penalties", "structured_outputs", "logprobs", "tools", "audio"}),
)

PROFILES = {profile.kind: profile for profile in (VLLM, SGLANG, TGI, TRTLLM, HOSTED)}


class Shown(Struct, frozen=True, kw_only=True):
    """What a server has shown of itself: True or False where it was asked, None where nobody did."""

    returns_token_ids: bool | None = None
    takes_priority: bool | None = None
    aborts: bool | None = None
    has_metrics: bool | None = None


def narrowed(profile: Profile, shown: Shown) -> Profile:
    """The profile without what the server has shown not to do."""
    return replace(
        profile,
        continues=profile.continues and shown.returns_token_ids is not False,
        orders=profile.orders and shown.takes_priority is not False,
        abort_path=None if shown.aborts is False else profile.abort_path,
        metrics=None if shown.has_metrics is False else profile.metrics,
    )
