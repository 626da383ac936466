"""What each kind of OpenAI-compatible server can do beyond the plain API.

A profile is the upper bound of a kind's capabilities. The capability probe at start narrows it and never widens it.
"""

from msgspec import Struct

from inferry.domain.routes import ALL_TASKS, GENERATES, Task
from inferry.domain.values import replace

ALL_FEATURES = frozenset(
    {"n", "logit_bias", "penalties", "min_p", "min_tokens", "structured_outputs", "logprobs", "tools", "audio"}
    | {"echo", "streamed_echo", "chat_echo", "images", "audio_input", "video"}
)
ENGINE_FIELDS = frozenset(
    {"include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words", "logits_processors"}
    | {"truncate_prompt_tokens", "thinking_token_budget", "chat_template", "chat_template_kwargs", "documents"}
)
"""Fields of vLLM that change the prompt or the output. Servers that refuse fields they lack are sent all of them."""
MEDIA_FEATURES = frozenset({"images", "audio_input", "video", "files"})
"""Features for media in messages."""


class MetricNames(Struct, frozen=True, kw_only=True):
    """Names of a kind's samples on `path`; None where it has none. Counters and histograms are without suffixes.

    `kv_usage` is the used share of the KV cache, `kv_capacity` its size in tokens, `cache_info` a sample with that size
    in its labels. `step_tokens` is a histogram of the tokens per step; `output_tokens` counts generated tokens.
    """

    path: bytes = b"/metrics"
    running: bytes
    waiting: bytes
    kv_usage: bytes | None = None
    kv_capacity: bytes | None = None
    cache_info: bytes | None = None
    prefix_hits: bytes | None = None
    preemptions: bytes | None = None
    step_tokens: bytes | None = None
    output_tokens: bytes | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """The capabilities of one kind of server.

    `can_resume`: accepts token ids on /v1/completions, and returns the ids of prompt and output on request.
    `cache_salts`: isolates prefix caches by `cache_salt`. `supports_priority`: schedules by `priority`, lower first.
    `abort_path`: endpoint that aborts requests by id. `detokenize_path`: endpoint that detokenises ids.
    `tokenize_path`: endpoint that tokenises chat requests.
    `usage_in_stream`: supports `stream_options.include_usage`. `is_hosted`: a hosted API with rate limit headers.
    `unsupported_fields`: fields of other kinds that must not be sent. `features`: request features; those for media are
    what the kind can take, and the model may take fewer. `probes_images`: ask the server at start whether its model
    takes images. `tasks`: what a model of such a server may do. Which of several tasks it does is
    detected, except for a hosted API.
    `fields`: the only request fields that have the effect they name, where a server ignores others in silence; with
    them, prompts are text. `takes_max_tokens_only`: needs an output limit with every call, under that name.
    `plain_messages`: takes messages of text, from the system, the user and the assistant. `refuses_silently`: ends a
    stream that it refuses without an event. `takes_request_ids`: takes any text as a request's id.
    `lists_models`: /v1/models lists what is served. `ping_path`: a cheap page that does not wait for the engine.
    """

    kind: str
    can_resume: bool = False
    cache_salts: bool = False
    supports_priority: bool = False
    abort_path: bytes | None = None
    detokenize_path: bytes | None = None
    tokenize_path: bytes | None = None
    metrics: MetricNames | None = None
    usage_in_stream: bool = True
    is_hosted: bool = False
    unsupported_fields: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    probes_images: bool = False
    tasks: frozenset[Task] = GENERATES
    fields: frozenset[str] | None = None
    takes_max_tokens_only: bool = False
    plain_messages: bool = False
    refuses_silently: bool = False
    takes_request_ids: bool = True
    lists_models: bool = True
    ping_path: bytes = b"/v1/models"


VLLM = Profile(
    kind="vllm",
    can_resume=True,
    cache_salts=True,
    supports_priority=True,
    abort_path=b"/abort_requests",
    detokenize_path=b"/detokenize",
    tokenize_path=b"/tokenize",
    metrics=MetricNames(
        running=b"vllm:num_requests_running",
        waiting=b"vllm:num_requests_waiting",
        kv_usage=b"vllm:kv_cache_usage_perc",
        cache_info=b"vllm:cache_config_info",
        prefix_hits=b"vllm:prefix_cache_hits_total",
        preemptions=b"vllm:num_preemptions_total",
        step_tokens=b"vllm:iteration_tokens_total",
        output_tokens=b"vllm:generation_tokens_total",
    ),
    features=ALL_FEATURES
    | ENGINE_FIELDS
    | {"prompt_logprobs", "beam_search", "dimensions", "use_activation", "prefill", "reasoning_effort"},
    tasks=ALL_TASKS,
    probes_images=True,
)

SGLANG = Profile(
    kind="sglang",
    metrics=MetricNames(
        running=b"sglang:num_running_reqs",
        waiting=b"sglang:num_queue_reqs",
        kv_usage=b"sglang:token_usage",
        kv_capacity=b"sglang:max_total_num_tokens",
    ),
    features=(ALL_FEATURES - {"audio"}) | {"dimensions", "prefill", "skip_special_tokens", "chat_template_kwargs"},
    tasks=GENERATES | {Task.EMBED},
)

TRTLLM = Profile(
    kind="trtllm",
    features=frozenset(
        {"n", "penalties", "min_p", "min_tokens", "structured_outputs", "logprobs", "tools"}
        | {"images", "audio_input", "video"}
        | ENGINE_FIELDS
    ),
)

HOSTED = Profile(
    kind="openai",
    is_hosted=True,
    unsupported_fields=frozenset({"cache_salt", "priority", "return_token_ids"}),
    features=frozenset(
        {"n", "logit_bias", "penalties", "structured_outputs", "logprobs", "tools", "audio"}
        | {"echo", "streamed_echo", "suffix", "streamed_suffix"}
        | {"images", "audio_input", "files", "dimensions"}
        | ENGINE_FIELDS
    ),
    tasks=GENERATES | {Task.EMBED},
)

_PLAIN_FIELDS = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
    | {"temperature", "top_p", "seed"}
)
_UNSENT_FIELDS = frozenset(
    {"user", "metadata", "service_tier", "store", "prompt_cache_key", "safety_identifier", "parallel_tool_calls"}
    | {"n", "best_of", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    | {"logit_bias", "min_p", "min_tokens", "echo", "suffix", "response_format", "tools", "tool_choice", "functions"}
)
"""Fields that need not be sent: they say nothing about the output, or only their defaults are left once `features` are
checked. Without tools there are no parallel calls of them."""
_HINTS = frozenset({"reasoning_effort", "verbosity", "prediction"})
"""Fields that promise nothing about the output."""
_LLAMACPP_FIELDS = frozenset(
    {"stop", "top_k", "min_p", "min_tokens", "logit_bias", "logprobs", "top_logprobs", "presence_penalty"}
    | {"frequency_penalty", "repeat_penalty", "mirostat_mode", "mirostat_tau", "mirostat_eta", "echo", "suffix"}
)

TGI = Profile(
    kind="tgi",
    metrics=MetricNames(running=b"tgi_batch_current_size", waiting=b"tgi_queue_size"),
    features=frozenset({"penalties", "structured_outputs", "logprobs", "tools", "images"}),
    # It derives a repetition penalty from the presence penalty, and ignores other fields in silence.
    fields=(_PLAIN_FIELDS | _UNSENT_FIELDS | _HINTS | {"stop", "modalities", "tool_prompt", "guideline"})
    - {"repetition_penalty"},
)

TRANSFORMERS = Profile(
    kind="transformers",
    usage_in_stream=False,  # it comes with the finish reason, and the option is ignored
    unsupported_fields=_UNSENT_FIELDS,
    fields=_PLAIN_FIELDS | _UNSENT_FIELDS,
    takes_max_tokens_only=True,
    lists_models=False,  # it lists the cache of the Hugging Face hub, and fails where there is none
    ping_path=b"/health",
)

LLAMACPP = Profile(
    kind="llamacpp",
    usage_in_stream=False,
    unsupported_fields=_UNSENT_FIELDS - _LLAMACPP_FIELDS,
    # Its streams ignore `echo`, and `suffix` with a model that cannot fill in the middle.
    features=frozenset({"logit_bias", "penalties", "min_p", "min_tokens", "logprobs", "echo", "suffix"}),
    # The engine has a repetition penalty under another name and with another default.
    fields=(_PLAIN_FIELDS | _UNSENT_FIELDS | _LLAMACPP_FIELDS) - {"repetition_penalty"},
    takes_max_tokens_only=True,
    plain_messages=True,
    refuses_silently=True,
    takes_request_ids=False,  # an id that is no UUID is refused
    ping_path=b"/health",  # answered with 404, while /v1/models waits for the running call, or interrupts it
)

PROFILES = {profile.kind: profile for profile in (VLLM, SGLANG, TGI, TRTLLM, TRANSFORMERS, LLAMACPP, HOSTED)}


class DetectedCapabilities(Struct, frozen=True, kw_only=True):
    """Results of the capability probe; None where a capability was not probed."""

    returns_token_ids: bool | None = None
    accepts_priority: bool | None = None
    supports_abort: bool | None = None
    has_metrics: bool | None = None
    accepts_images: bool | None = None


def restrict_profile(profile: Profile, capabilities: DetectedCapabilities) -> Profile:
    """The profile without the capabilities that the probe refuted."""
    return replace(
        profile,
        can_resume=profile.can_resume and capabilities.returns_token_ids is not False,
        supports_priority=profile.supports_priority and capabilities.accepts_priority is not False,
        abort_path=None if capabilities.supports_abort is False else profile.abort_path,
        metrics=None if capabilities.has_metrics is False else profile.metrics,
        features=profile.features - {"images"} if capabilities.accepts_images is False else profile.features,
    )
