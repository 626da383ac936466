"""Plain values of the workers over HTTP.

Apart from what works with them, for mypyc compiles that and cannot compile structs.
"""

from msgspec import Struct

from inferry.adapters.workers.profiles import VLLM, Profile
from inferry.domain.workers import Room


class HttpWorkerSettings(Struct, frozen=True, kw_only=True):
    """One server. It is asked every `liveness_interval_s` while idle whether it is alive, and is taken as down when it
    is silent for `liveness_timeout_s`; a hosted API is not asked. `salts` keeps tenants' prefix caches apart where the
    server can, with hashes keyed by `salt_secret`; None draws one. Of several `api_keys`, the one with most left is
    used.
    """

    url: str
    profile: Profile = VLLM
    models: tuple[str, ...] = ()
    group: str = "default"
    pool: str | None = None
    api_key: str | None = None
    api_keys: tuple[str, ...] = ()
    room: Room = Room(sequences=256)
    asks_for_priorities: bool = False
    salts: bool = True
    salt_secret: str | None = None
    controlled: bool = False
    chunk_tokens: int | None = None
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 120.0
    gap_timeout_s: float = 30.0
    liveness_interval_s: float = 2.0
    liveness_timeout_s: float = 1.5

    def __repr__(self) -> str:
        return f"HttpWorkerSettings({self.profile.kind}, {self.url})"  # keys and secrets are nobody's to print


class EngineSteps(Struct, frozen=True):
    """The engine's pace between the last two readings."""

    per_s: float = 0.0
    tokens_each: float = 0.0


class AsksForIds(Struct):
    return_token_ids: bool | None = None


class Choices(Struct):
    n: int | None = None


class PromptText(Struct):
    prompt: str
