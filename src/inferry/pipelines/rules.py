"""Which model a route chooses: rules over what is known of a call before it runs. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

HASH_CHARS = 16


class Condition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a call must be for a rule to apply. All conditions that are set must hold."""

    min_prompt_bytes: int | None = None
    """Smallest size of the messages, prompt or input, as JSON in bytes."""
    max_prompt_bytes: int | None = None
    """Largest size of the messages, prompt or input, as JSON in bytes."""
    templates: tuple[str, ...] | None = None
    """Values of `x-inferry-template-id`."""
    system_hashes: tuple[str, ...] | None = None
    """Hashes of the system prompt: the first 16 hexadecimal digits of the SHA-256 of its text."""
    tenants: tuple[str, ...] | None = None
    """Names of tenants."""
    tools: bool | None = None
    """Whether the call offers tools."""
    lanes: tuple[str, ...] | None = None
    """Lanes: P0, P1, P2."""
    headers: dict[str, str] = {}
    """Request headers and their values. Names are in lower case."""


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of a route."""

    when: Condition
    """What the call must be."""
    model: str
    """The model that gets the call."""


class CallFacts(Struct, frozen=True, kw_only=True):
    """What rules know of a call."""

    prompt_bytes: int
    template: str | None
    system_hash: str | None
    tenant: str
    has_tools: bool
    lane: str
    headers: Mapping[str, str]


def read_facts(
    fields: Mapping[str, Raw], headers: Mapping[bytes, bytes], tenant: str, lane: str, *, with_system_hash: bool = True
) -> CallFacts:
    """The facts of a request from its top-level fields. The system prompt is read only where a rule asks for it."""
    prompt = next((fields[name] for name in ("messages", "prompt", "input", "query", "text_1") if name in fields), b"")
    template = headers.get(b"x-inferry-template-id")
    tools = fields.get("tools")
    return CallFacts(
        prompt_bytes=len(bytes(prompt)),
        template=None if template is None else template.decode("latin-1"),
        system_hash=_system_hash(fields) if with_system_hash else None,
        tenant=tenant,
        has_tools=tools is not None and bytes(tools) not in (b"[]", b"null"),
        lane=lane,
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()},
    )


def choose(rules: Sequence[Rule], facts: CallFacts) -> str | None:
    """The model of the first rule that applies; None where no rule does."""
    return next((rule.model for rule in rules if applies(rule.when, facts)), None)


def applies(when: Condition, facts: CallFacts) -> bool:
    return (
        (when.min_prompt_bytes is None or facts.prompt_bytes >= when.min_prompt_bytes)
        and (when.max_prompt_bytes is None or facts.prompt_bytes <= when.max_prompt_bytes)
        and (when.templates is None or facts.template in when.templates)
        and (when.system_hashes is None or facts.system_hash in when.system_hashes)
        and (when.tenants is None or facts.tenant in when.tenants)
        and (when.tools is None or facts.has_tools == when.tools)
        and (when.lanes is None or facts.lane in when.lanes)
        and all(facts.headers.get(name) == value for name, value in when.headers.items())
    )


def hash_system_prompt(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARS]


def last_user_content(fields: Mapping[str, Raw]) -> Any:
    """What a classifier reads: the content of the last message of a user, or the prompt. None where there is none."""
    if "messages" in fields:
        messages = [one for one in msgspec.json.decode(fields["messages"]) if isinstance(one, dict)]
        return next((one.get("content") for one in reversed(messages) if one.get("role") == "user"), None)
    prompt = msgspec.json.decode(fields["prompt"]) if "prompt" in fields else None
    return prompt if isinstance(prompt, str) else None


def _system_hash(fields: Mapping[str, Raw]) -> str | None:
    if "messages" not in fields:
        return None
    messages: list[dict[str, Any]] = msgspec.json.decode(fields["messages"])
    first = messages[0] if messages else {}
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return None
    content = first.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return hash_system_prompt(content) if isinstance(content, str) else None
