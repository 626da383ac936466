"""What a configuration says of workers: one Struct for each kind."""

import typing
from typing import Any, Literal

from msgspec import Struct


class EmbeddedWorkerConfig(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="embedded"
):
    """Inferry's own engine in a process of its own (needs the `engine` extra)."""

    name: str = "local"
    """How the worker is called in headers, metrics and the ledger."""
    model: str | None = None
    """A Hugging Face model directory; null makes and uses the small built-in model."""
    models: tuple[str, ...] = ()
    """Names the model is served under; none: the directory's name, or `inferry-tiny`."""
    group: str = "default"
    """Worker group."""
    pool: str | None = None
    """The one tenant it works for, whose `isolation` is `pool`; null works for all others."""
    max_sequences: int = 64
    """Most sequences that run at once."""
    kv_tokens: int = 65_536
    """Room of the KV cache, in tokens."""
    chunk_tokens: int = 256
    """Most prompt tokens computed in one engine step: smaller keeps live token gaps short, larger prefills faster."""
    capacity: Literal["adaptive", "fixed"] = "adaptive"
    """How much of the engine is used: computed from what lanes promise and what it is seen to do, or always all."""
    threads: int | None = None
    """CPU threads of the engine; null picks."""
    default_output_tokens: int = 512
    """Output limit of a call that names none."""


class HttpWorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that speaks the OpenAI API. What it can do beyond that depends on its kind."""

    name: str
    """How the worker is called in headers, metrics and the ledger."""
    url: str
    """Where the server is, without `/v1`."""
    models: tuple[str, ...] = ()
    """Models to send to it; none: what its `/v1/models` lists at start."""
    group: str = "default"
    """Worker group."""
    pool: str | None = None
    """The one tenant it works for, whose `isolation` is `pool`; null works for all others."""
    api_key: str | None = None
    """Sent upstream as a bearer token; `$NAME` takes it from that environment variable. Client keys are never sent."""
    max_sequences: int = 256
    """Most calls in flight to this server."""
    kv_tokens: int | None = None
    """Most KV tokens the calls in flight may be expected to need; null does not bound it."""
    prefill_tokens: int | None = None
    """Most prompt tokens sent and still without a first token, those expected in its prefix cache not counted; this is
    what first tokens of live calls wait behind. null does not bound it."""
    capacity: Literal["adaptive", "fixed"] = "adaptive"
    """How much of the server is used: computed from what lanes promise and what it is seen to do, within the figures
    above; or always all they allow."""
    chunk_tokens: int | None = None
    """What the server computes in one step (vLLM's `--max-num-batched-tokens`); null where it is not
    known."""
    connect_timeout_s: float = 5.0
    """How long a connection may take."""
    first_token_timeout_s: float = 120.0
    """How long an answer may take to begin, and then its first token, before the call fails with 504 `worker_timeout`.
    Comments in between do not count."""
    inter_token_timeout_s: float = 30.0
    """The same once tokens have come: how long the next may take."""


class VllmWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="vllm"):
    """A vLLM server, or anything else that speaks the OpenAI API: what it cannot do is found out at the start."""

    engine_priority: bool = True
    """Tell the server each call's lane as its `priority`, where it takes that (vLLM's `--scheduling-policy priority`).
    It is asked once, at the start."""
    isolation: Literal["salt", "none"] = "salt"
    """`salt` keeps the prefix caches of tenants apart, so that nobody can tell from the time to a first token what
    others have sent; `none` lets tenants share what is cached."""
    salt_secret: str | None = None
    """What tenants' salts are derived from (`$NAME` takes it from the environment). null draws one at every start,
    and what the server had cached before is not found again."""


class SglangWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="sglang"):
    """An SGLang server. Start it with `--enable-metrics`, so that its load is seen."""


class TgiWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="tgi"):
    """A server of Text Generation Inference."""


class TrtllmWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="trtllm"):
    """A TensorRT-LLM server (`trtllm-serve`)."""


class OpenAIWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="openai"):
    """A hosted API, paced by what its `x-ratelimit-…` and `Retry-After` headers say."""

    api_keys: tuple[str, ...] = ()
    """Several keys instead of one, each paced on its own; the one with most left is used. `$NAME` takes one from the
    environment."""
    capacity: Literal["adaptive", "fixed"] = "fixed"
    """How much of it is used: always what its headers and the figures above allow, or computed from what lanes promise
    as for an engine of one's own."""


class VllmInProcessWorkerConfig(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm-inprocess"
):
    """vLLM without its HTTP server, in a process of its own that vLLM's virtual environment runs."""

    name: str
    """How the worker is called in headers, metrics and the ledger."""
    model: str
    """A Hugging Face model directory with its tokenizer."""
    models: tuple[str, ...] = ()
    """Names the model is served under; none: the directory's name."""
    group: str = "default"
    """Worker group."""
    pool: str | None = None
    """The one tenant it works for, whose `isolation` is `pool`; null works for all others."""
    python: str = ".venv-vllm/bin/python"
    """The interpreter of the virtual environment that has vLLM, never the gateway's own."""
    max_sequences: int = 256
    """Most sequences that run at once (vLLM's `max_num_seqs`)."""
    chunk_tokens: int = 2048
    """Most tokens computed in one step (vLLM's `max_num_batched_tokens`): smaller keeps live token gaps short."""
    context_tokens: int | None = None
    """Longest context (vLLM's `max_model_len`); null keeps the model's own."""
    engine_args: dict[str, Any] = {}
    """More of vLLM's engine arguments by their Python names, such as `dtype` or `gpu_memory_utilization`."""
    capacity: Literal["adaptive", "fixed"] = "adaptive"
    """How much of the engine is used: computed from what lanes promise and what it is seen to do, or always all."""
    default_output_tokens: int = 512
    """Output limit of a call that names none."""


HttpWorker = VllmWorkerConfig | SglangWorkerConfig | TgiWorkerConfig | TrtllmWorkerConfig | OpenAIWorkerConfig
HTTP_KINDS: tuple[type[HttpWorkerConfig], ...] = typing.get_args(HttpWorker)
WorkerConfig = EmbeddedWorkerConfig | HttpWorker | VllmInProcessWorkerConfig
