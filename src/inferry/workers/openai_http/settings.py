"""Structs of the HTTP workers, in a module of their own because mypyc cannot compile structs."""

from msgspec import Raw, Struct

from inferry.domain.routes import OutputLength, Task, WorkerRole
from inferry.domain.workers import Capacity, KvPacking
from inferry.workers.openai_http.profiles import VLLM, Profile


class HttpWorkerSettings(Struct, frozen=True, kw_only=True):
    """One server.

    An idle server is probed every `liveness_interval_s` and is down when it does not respond for `liveness_timeout_s`;
    a hosted API is not probed. `cache_salts` isolates the prefix caches of tenants where the server supports it, with
    hashes keyed by `salt_secret`, or by a random secret. Of several `api_keys` the one with the most quota left is
    used. `media_tokens` are the assumed prompt tokens of one image, audio, video or file. `tasks`: what the models
    do; None detects it. A request holds `max_inputs` inputs to embed or score at most. `gpus`: GPUs behind the server.
    `overflow`: it takes only jobs that overflow. `role` and `min_prefill_tokens`: see `WorkerView`. `context_tokens`:
    the context where the server lists none. `shares_cache`: tenants share its prefix cache.
    """

    url: str
    profile: Profile = VLLM
    models: tuple[str, ...] = ()
    group: str = "default"
    pool: str | None = None
    adapters: tuple[str, ...] = ()
    precision: str | None = None
    output_length: OutputLength | None = None
    kv_packing: KvPacking = "sum"
    api_key: str | None = None
    api_keys: tuple[str, ...] = ()
    capacity: Capacity = Capacity(sequences=256)
    wants_priorities: bool = False
    cache_salts: bool = True
    salt_secret: str | None = None
    media_tokens: int = 0
    tasks: frozenset[Task] | None = None
    max_inputs: int = 2048
    controlled: bool = False
    chunk_tokens: int | None = None
    gpus: int = 1
    overflow: bool = False
    context_tokens: int | None = None
    shares_cache: bool = False
    role: WorkerRole = "both"
    min_prefill_tokens: int = 1
    connect_timeout_s: float = 5.0
    first_token_timeout_s: float = 120.0
    inter_token_timeout_s: float = 30.0
    liveness_interval_s: float = 2.0
    liveness_timeout_s: float = 1.5

    def __repr__(self) -> str:
        return f"HttpWorkerSettings({self.profile.kind}, {self.url})"  # without keys and secrets


class TokenIdsOption(Struct):
    return_token_ids: bool | None = None


class ChoicesOption(Struct):
    n: int | None = None


class TextPart(Struct):
    type: str = ""
    text: str = ""


class PromptText(Struct):
    prompt: str


class KvTransfer(Struct):
    kv_transfer_params: Raw = Raw(b"null")
