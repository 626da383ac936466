"""The `workers` section of the configuration: one Struct per kind."""

import typing
from typing import Any, Literal

from msgspec import Struct

from inferry.domain.routes import OutputLength, WorkerRole
from inferry.domain.workers import EngineMode, KvPacking, ToolFormatName

MediaKind = Literal["images", "audio_input", "video", "files"]


class EmbeddedWorkerConfig(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="embedded"
):
    """The embedded engine, in its own process (needs the `engine` extra)."""

    name: str = "local"
    """Name of the worker in headers, metrics and the ledger."""
    model: str | None = None
    """A Hugging Face model directory; null is the bundled model `inferry-triage`."""
    models: tuple[str, ...] = ()
    """Names the model is served under; default: the directory's name, or `inferry-triage`."""
    group: str = "default"
    """Worker group."""
    pool: str | None = None
    """Tenant with `isolation: pool` that the worker is reserved for; null serves all others."""
    precision: str | None = None
    """Precision of the model there, such as `bf16` or `fp8`; a tenant may require one. null if it is not stated."""
    output_length: OutputLength | None = None
    """Calls that the worker is for, by predicted output: `short`, `long`, or null for both. See
    `lanes.<lane>.long_output_tokens`."""
    kv_packing: KvPacking = "sum"
    """How calls share the KV cache where its size is known. `sum` adds up their predicted peaks; `timed` predicts the
    peak of all together, since calls end at different times."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes. `cuda` is the first visible NVIDIA GPU and needs triton. `auto` is `cuda` where the
    machine has an NVIDIA GPU and triton is installed, else `cpu`."""
    max_sequences: int | None = None
    """Maximum number of running sequences; with `static` and `dynamic`, rows of a pass. null: 64 on a CPU, 256 on a
    GPU."""
    kv_tokens: int | Literal["auto"] | None = None
    """Size of the KV cache, in tokens. `auto` fills what the weights leave of `memory_share`. null: 65,536 on a CPU,
    `auto` on a GPU. The engine does not start if it does not fit into memory; `inferry models check` says what fits."""
    memory_share: float | None = None
    """Share of the device's memory that an engine with `kv_tokens: auto` uses, less what other processes use on a GPU;
    0.2 to 0.3 where latency matters more than throughput. null: 0.8, as `inferry models check` assumes."""
    mode: EngineMode = "continuous"
    """How calls share steps. `continuous`: they join and leave in every step. `hybrid`: prompts are computed
    in groups, in steps of their own, which makes long inter-token latencies rare. `static`: a padded pass runs until
    its longest call has ended. `dynamic`: a padded pass whose free rows are refilled."""
    decode_wait_ms: int = 500
    """With `mode: hybrid`, about the longest time that streams wait for a group of prompts, in milliseconds."""
    context_tokens: int | None = None
    """Maximum prompt and output tokens of a call; null: the model's context."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and KV cache. `auto` is float32 on a CPU and the checkpoint's own on a GPU. A CPU that cannot
    compute in the dtype is refused at startup."""
    chunk_tokens: int | None = None
    """Maximum prompt tokens per engine step: smaller values reduce the ITL of live streams, larger ones prefill
    faster. null: 256 on a CPU, 2,048 on a GPU."""
    prefix_cache: bool = True
    """Keep the KV of prompts and outputs after a call, for later calls of the tenant that start with the same
    tokens. Cached blocks are evicted by last use when the space is needed."""
    kv_pause_s: float = 60.0
    """After a call of a [run](../howto/runs.md) its KV is evicted only after all other cached KV, for this many seconds
    or until the run is finished or cancelled: the time in which the run waits for a tool. At most half of the KV cache
    is kept in this way. 0 keeps nothing."""
    adapters: dict[str, str] = {}
    """LoRA adapters that are loaded at startup: PEFT directories by the name that calls use as a model."""
    adapter_dirs: tuple[str, ...] = ()
    """Directories below which operators may load further adapters with `POST /v1/load_lora_adapter`. Links are followed
    first. Empty allows none."""
    max_adapters: int | None = None
    """Maximum number of loaded adapters. Memory for all is reserved at startup. null: those of `adapters`, and 8 more
    if `adapter_dirs` is set."""
    max_adapter_rank: int = 16
    """Maximum rank of an adapter. A GPU reserves the memory of this rank for each."""
    capacity: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive` computes how much of the engine is used from SLO targets and measured step costs; `fixed` uses all
    of it."""
    gpus: int = 1
    """GPUs that the engine uses. GPU-seconds in the ledger and `prices.<model>.gpu_hour` count each."""
    threads: int | None = None
    """CPU threads of the engine; null: half of the cores."""
    default_output_tokens: int = 512
    """Output limit of a call without one."""
    tool_call_format: Literal["auto"] | ToolFormatName = "auto"
    """How the model writes tool calls: `hermes` (also Qwen), `llama3_json` or `mistral`. `auto` reads it from the chat
    template; tools for a template that takes none are described in the system message, in the format `hermes`."""


class HttpWorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server with the OpenAI API. Further features depend on its kind."""

    name: str
    """Name of the worker in headers, metrics and the ledger."""
    url: str
    """URL of the server, without `/v1`."""
    models: tuple[str, ...] = ()
    """Models to send to it; default: what its `/v1/models` lists at startup."""
    group: str = "default"
    """Worker group."""
    pool: str | None = None
    """Tenant with `isolation: pool` that the worker is reserved for; null serves all others."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that the server has loaded, called by their names as models. Adapters that the server lists with
    a `parent`, as vLLM does, need no entry."""
    precision: str | None = None
    """Precision of the model there, such as `bf16` or `fp8`; a tenant may require one. null if it is not stated."""
    output_length: OutputLength | None = None
    """Calls that the worker is for, by predicted output: `short`, `long`, or null for both. See
    `lanes.<lane>.long_output_tokens`."""
    kv_packing: KvPacking = "sum"
    """How calls share the KV cache where its size is known. `sum` adds up their predicted peaks; `timed` predicts the
    peak of all together, since calls end at different times."""
    media: tuple[MediaKind, ...] | None = None
    """Media in messages that the model takes: `images`, `audio_input`, `video`, `files`. Calls with others are refused
    with `unsupported_feature`. null passes on what the kind of server can take; a vLLM server is asked at startup
    whether its model takes images."""
    media_tokens: int = 1000
    """Prompt tokens assumed for each image, audio, video or file. Their bytes are not counted."""
    api_key: str | None = None
    """Sent upstream as a bearer token; `$NAME` reads an environment variable. Client keys are never sent."""
    max_sequences: int = 256
    """Maximum number of calls in flight."""
    kv_tokens: int | None = None
    """Maximum predicted KV tokens of the calls in flight; null: the size of the KV cache that the server's metrics
    report, or no limit if they report none."""
    prefill_tokens: int | None = None
    """Maximum uncached prompt tokens sent without a first token, ahead of which live calls wait; null sets no
    limit."""
    capacity: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive` computes how much of the server is used from SLO targets and measured step costs, within the
    limits above; `fixed` always uses these limits."""
    chunk_tokens: int | None = None
    """Maximum tokens per step (vLLM's `--max-num-batched-tokens`); null if unknown."""
    context_tokens: int | None = None
    """Maximum prompt and output tokens of a call, where the server's `/v1/models` does not tell; null if unknown."""
    gpus: int = 1
    """GPUs behind the server, such as vLLM's `--tensor-parallel-size`. GPU-seconds in the ledger and
    `prices.<model>.gpu_hour` count each. 0 keeps no GPU-seconds."""
    tasks: tuple[Literal["generate", "embed", "score", "classify"], ...] | None = None
    """What the models do. null asks a `vllm` server for an embedding, a score and a classification of its first model
    at startup, and an `sglang` server for an embedding; a hosted API may generate and embed; other kinds generate."""
    max_inputs_per_request: int = 2048
    """Maximum inputs to embed, score or classify in one request, of one call or of several calls together."""
    connect_timeout_s: float = 5.0
    """Time to connect, in seconds."""
    first_token_timeout_s: float = 120.0
    """Time until the response starts, and from there until the first token, in seconds; then the call fails with
    504 `worker_timeout`. SSE comments do not count."""
    inter_token_timeout_s: float = 30.0
    """Time until the next token, in seconds."""


class VllmWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="vllm"):
    """A vLLM server, or any other server with the OpenAI API: missing features are detected at startup."""

    engine_priority: bool = True
    """Send each call's lane as its `priority`, if the server supports it (vLLM's `--scheduling-policy priority`)."""
    isolation: Literal["salt", "none"] = "salt"
    """`salt` separates the prefix caches of tenants, so TTFT reveals nothing about other tenants' prompts; `none`
    shares the cache."""
    role: WorkerRole = "both"
    """`prefill` computes prompts and hands their KV over to a worker of role `decode`; `decode` takes KV over, and
    computes whole calls too; `both` computes whole calls. See [Prefill and decode
    apart](../howto/prefill-and-decode-apart.md)."""
    min_prefill_tokens: int = 1024
    """With `role: prefill`: uncached prompt tokens, as predicted, from which on a prompt is computed here; of several
    such workers of a model the smallest number counts. Workers of role `decode` compute shorter ones."""
    salt_secret: str | None = None
    """Secret from which salts are derived (`$NAME` reads an environment variable). null draws a new one at every
    start, which invalidates what the server has cached."""


class UnsaltedWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True):
    """A server whose prefix cache cannot be salted by tenant."""

    isolation: Literal["none"] | None = None
    """`none` lets tenants share the server's prefix cache. It must be written out unless the worker is reserved for one
    tenant by `pool`, because the time to a first token can then reveal what another tenant asked. The log says so."""


class SglangWorkerConfig(UnsaltedWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="sglang"):
    """An SGLang server. Start it with `--enable-metrics` so that its load is known."""


class TgiWorkerConfig(UnsaltedWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="tgi"):
    """A Text Generation Inference server."""


class TrtllmWorkerConfig(UnsaltedWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="trtllm"):
    """A TensorRT-LLM server (`trtllm-serve`)."""


class TransformersWorkerConfig(UnsaltedWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="transformers"):
    """`transformers serve`. Name its model in `models`: its `/v1/models` lists what has been downloaded."""

    max_sequences: int = 1
    """Maximum number of calls in flight. The server computes one call after another."""


class LlamaCppWorkerConfig(UnsaltedWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="llamacpp"):
    """The server of llama-cpp-python. Set `context_tokens` to its `--n_ctx`."""

    max_sequences: int = 1
    """Maximum number of calls in flight. The server computes one call after another, and a second one interrupts the
    first unless it was started with `--interrupt_requests false`."""


class OpenAIWorkerConfig(HttpWorkerConfig, frozen=True, kw_only=True, tag_field="kind", tag="openai"):
    """A hosted API, paced by its `x-ratelimit-…` and `Retry-After` headers."""

    api_keys: tuple[str, ...] = ()
    """Several keys, each paced on its own; the one with the most quota left is used. `$NAME` reads an environment
    variable."""
    batch_api: Literal["openai", "anthropic"] | None = None
    """Execute items of batches for `models`, which must be named, through the provider's batch API: `openai` for the
    endpoints of chat, completions and embeddings, `anthropic` for `/v1/messages`. Items of tenants and keys with token
    or money ceilings, and all other items, are sent as calls. null sends all items as calls."""
    overflow: bool = False
    """The worker takes only calls whose deadline or TTFT target own workers cannot meet, within the ceilings of
    [`overflow`](../howto/overflow.md). It serves every lane, whatever `lanes.<lane>.groups` says."""
    batch_price_factor: float = 0.5
    """Price of items executed through `batch_api`, as a multiple of the model's price."""
    gpus: int = 0
    """GPUs behind the server: none that are paid by the hour. A hosted API has prices per token."""
    capacity: Literal["adaptive", "fixed"] = "fixed"
    """`fixed` uses what the headers and the limits above allow; `adaptive` computes capacity as for a self-hosted
    engine."""


class VllmInProcessWorkerConfig(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm-inprocess"
):
    """vLLM without its HTTP server, in a process that runs in its own virtual environment."""

    name: str = "vllm"
    """Name of the worker in headers, metrics and the ledger."""
    model: str
    """A Hugging Face model directory with its tokenizer."""
    models: tuple[str, ...] = ()
    """Names the model is served under; default: the directory's name."""
    group: str = "default"
    """Worker group."""
    pool: str | None = None
    """Tenant with `isolation: pool` that the worker is reserved for; null serves all others."""
    precision: str | None = None
    """Precision of the model there, such as `bf16` or `fp8`; a tenant may require one. null if it is not stated."""
    output_length: OutputLength | None = None
    """Calls that the worker is for, by predicted output: `short`, `long`, or null for both. See
    `lanes.<lane>.long_output_tokens`."""
    kv_packing: KvPacking = "sum"
    """How calls share the KV cache where its size is known. `sum` adds up their predicted peaks; `timed` predicts the
    peak of all together, since calls end at different times."""
    python: str = ".venv-vllm/bin/python"
    """Interpreter of the virtual environment that has vLLM."""
    max_sequences: int = 256
    """Maximum number of running sequences (vLLM's `max_num_seqs`)."""
    chunk_tokens: int = 2048
    """Maximum tokens per step (vLLM's `max_num_batched_tokens`): smaller values reduce the ITL of live streams."""
    context_tokens: int | None = None
    """Maximum context (vLLM's `max_model_len`); null: the model's own."""
    gpus: int | None = None
    """GPUs that the engine uses. GPU-seconds in the ledger and `prices.<model>.gpu_hour` count each. null:
    `tensor_parallel_size` times `pipeline_parallel_size` of `engine_args`."""
    engine_args: dict[str, Any] = {}
    """Further engine arguments by their Python names, such as `dtype` or `gpu_memory_utilization`."""
    capacity: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive` computes how much of the engine is used from SLO targets and measured step costs; `fixed` uses all
    of it."""
    default_output_tokens: int = 512
    """Output limit of a call without one."""


class PythonWorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="python"):
    """A Python function of a list of inputs, in its own process. See [Serve a Python
    function](../howto/python-workers.md)."""

    name: str
    """Name of the worker in headers, metrics and the ledger."""
    function: str
    """The function, as `package.module:name`. It may be synchronous or asynchronous, or made by `@inferry.batched`."""
    model: str
    """Name the function is served under."""
    task: Literal["generate", "embed", "score"]
    """What it does. `generate`: prompts, or the messages of chats, to texts. `embed`: texts to vectors. `score`: pairs
    of texts to numbers."""
    directory: str = "."
    """Directory in which the module is found, besides those of installed packages."""
    max_batch: int = 64
    """Most inputs of one call of the function."""
    call_timeout_s: float = 60.0
    """Time for one call of the function, in seconds. Then its process is killed and started again."""
    default_output_tokens: int = 512
    """Output limit of a call without one. Four bytes of a text count as a token."""
    group: str = "default"
    """Worker group."""
    pool: str | None = None
    """Tenant with `isolation: pool` that the worker is reserved for; null serves all others."""
    precision: str | None = None
    """Precision of the model there, such as `bf16` or `fp8`; a tenant may require one. null if it is not stated."""
    gpus: int = 0
    """GPUs that the function uses. GPU-seconds in the ledger and `prices.<model>.gpu_hour` count each. 0 keeps no
    GPU-seconds."""

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)


class RayWorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="ray"):
    """Engines on a Ray cluster, placed by `inferry ray deploy` (needs the `ray` extra). Each replica is a worker."""

    name: str
    """Name of the deployment. A replica's worker is called `NAME-REPLICA` in headers, metrics and the ledger."""
    engine: EmbeddedWorkerConfig | VllmInProcessWorkerConfig
    """The engine of a replica, written as a worker of `kind: embedded` or `kind: vllm-inprocess`; its `name` is not
    used. Models, group and pool are given there. Paths must exist on every node. An embedded engine with `device: auto`
    is on a GPU if `gpus_per_replica` is above 0."""
    address: str = "auto"
    """Address of the Ray cluster, `HOST:PORT`; `auto` is the cluster of this host. The gateway's host must be a node of
    the cluster. All workers of `kind: ray` have the same address."""
    app: str | None = None
    """Name of the application on Ray Serve; null: the worker's name."""
    min_replicas: int = 1
    """Fewest replicas. 0 stops the last replica when the group is idle for `scaling.scale_down_after_s`."""
    max_replicas: int = 1
    """Most replicas. Between both the gateway sets their number, see `scaling`."""
    cpus_per_replica: float = 1.0
    """CPUs that Ray reserves for a replica."""
    gpus_per_replica: float = 0.0
    """GPUs that Ray reserves for a replica."""
    max_scale_up_wait_s: float = 300.0
    """How long a call for a model without a replica waits for one, in seconds; then it gets 503 `no_worker`."""
    drain_timeout_s: float = 60.0
    """Time for the calls of a replica to complete before the replica is stopped, in seconds. What is left then resumes
    on another replica."""

    @property
    def models(self) -> tuple[str, ...]:
        return self.engine.models

    @property
    def group(self) -> str:
        return self.engine.group

    @property
    def pool(self) -> str | None:
        return self.engine.pool

    @property
    def precision(self) -> str | None:
        return self.engine.precision

    @property
    def app_name(self) -> str:
        return self.app or self.name


HttpWorker = (
    VllmWorkerConfig
    | SglangWorkerConfig
    | TgiWorkerConfig
    | TrtllmWorkerConfig
    | TransformersWorkerConfig
    | LlamaCppWorkerConfig
    | OpenAIWorkerConfig
)
HTTP_KINDS: tuple[type[HttpWorkerConfig], ...] = typing.get_args(HttpWorker)
WorkerConfig = EmbeddedWorkerConfig | HttpWorker | VllmInProcessWorkerConfig | PythonWorkerConfig | RayWorkerConfig
