"""The `histories` section of the configuration: when long conversations are summarised."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from inferry.cli.config.checks import check_positive
from inferry.domain.storage import StoreMode
from inferry.ingress.histories.conversation import HistorySettings

PROMPT = (
    "Summarise the conversation below for the assistant that continues it. Keep goals, decisions, facts, names, "
    "numbers, file paths, results of tools and open questions. Write plain text, without an introduction."
)


class HistoryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Summaries of long conversations of a model. See [Summarise long histories](../howto/long-histories.md)."""

    threshold: float = 0.7
    """Share of the context from which the older messages of a conversation are summarised, above 0 and below 1."""
    keep_messages: int = 8
    """Latest messages that are never summarised."""
    context_tokens: int | None = None
    """Context of the model; null: what its worker reports. Without either, nothing is summarised."""
    summary_model: str | None = None
    """Model that writes summaries; null: the conversation's own. The caller must be allowed to use it."""
    max_summary_tokens: int = 1024
    """Output limit of a summary."""
    prompt: str = PROMPT
    """Instruction to the model that writes summaries."""
    wait_s: float = 60.0
    """How long a call that exceeds the context waits for its summary, in seconds, within its deadline."""
    ttl_s: float | None = 7 * 86_400.0
    """How long the original is stored, in seconds; null: until it is deleted."""
    tenants: tuple[str, ...] | None = None
    """Tenants whose conversations are summarised; null: all."""

    def settings(self) -> HistorySettings:
        return HistorySettings(**{name: getattr(self, name) for name in HistorySettings.__struct_fields__})


def check_histories(histories: Mapping[str, HistoryConfig], store: StoreMode) -> Iterator[str]:
    if histories and store == "never":
        yield "histories store the originals of conversations, which storage.store: never forbids"
    for model, config in histories.items():
        where = f"histories.{model}"
        if not 0 < config.threshold < 1:
            yield f"{where}.threshold must be above 0 and below 1"
        names = ("keep_messages", "context_tokens", "max_summary_tokens", "wait_s", "ttl_s")
        yield from check_positive(where, config, *names)
