"""Advice on engine settings that endanger a lane's SLO targets. Pure."""

from collections.abc import Mapping

from msgspec import Struct

from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.workers import RECOMMENDED_CHUNK_TOKENS

FAST_PREFILL_TOKENS_PER_S = 40_000
"""Prompt tokens per second of an 8B model on a large GPU. On a slower engine a long step takes longer still."""
ITLS_PER_STEP = 4
STEPS_PER_TTFT = 4
"""A step is too long above this multiple of `itl_ms`, or this share of `ttft_ms`."""
VLLM_CHUNK_TOKENS = 8192
"""Default of vLLM's server on a GPU of 70 GB or more. Its metrics do not report the limit."""


class EngineFacts(Struct, frozen=True, kw_only=True):
    """Settings and observations of one worker; None where unknown.

    `chunk_tokens` is the limit of prompt tokens per step. `engine_sequences` is the number of sequences that the engine
    ran while others waited in its own queue. `decodes`: live streams run there.
    """

    worker: str
    kind: str
    max_sequences: int | None = None
    prefill_tokens: int | None = None
    kv_tokens: int | None = None
    chunk_tokens: int | None = None
    decodes: bool = True
    engine_sequences: int | None = None
    kv_capacity: int | None = None
    preempts: bool = False
    has_metrics: bool | None = None
    supports_priority: bool | None = None
    reports_cached: bool | None = None
    shares_cache: bool = False
    may_ignore_salts: bool = False


def advice(facts: EngineFacts, lanes: Mapping[Lane, LanePolicy]) -> list[str]:
    """Sentences for the operator of the engine."""
    step_message = _step_message(facts, lanes)
    messages = (
        step_message,
        *_size_messages(facts, step_too_long=step_message is not None),
        *_capability_messages(facts),
    )
    return [f"worker {facts.worker}: {message}" for message in messages if message]


def _step_message(facts: EngineFacts, lanes: Mapping[Lane, LanePolicy]) -> str | None:
    slo_limit, is_vllm = _max_step(lanes), facts.kind == "vllm"
    chunk = facts.chunk_tokens or (VLLM_CHUNK_TOKENS if is_vllm and facts.decodes else None)
    if chunk is None or slo_limit is None:
        return None
    limit_s, target = slo_limit
    step_s = chunk / FAST_PREFILL_TOKENS_PER_S
    if step_s <= limit_s or chunk <= RECOMMENDED_CHUNK_TOKENS:
        return None
    flag = "start it with --max-num-batched-tokens" if is_vllm else "let it compute"
    fix = f"{flag} {RECOMMENDED_CHUNK_TOKENS}"
    if facts.chunk_tokens is None:
        fix += f" and set chunk_tokens: {RECOMMENDED_CHUNK_TOKENS}, or set chunk_tokens to the step it has"
    step = f"a step of {chunk} tokens takes {1000 * step_s:.0f} ms on a fast GPU, too long for {target}; {fix}"
    return step if facts.chunk_tokens else f"chunk_tokens is not set, and vLLM's default is up to {chunk}: {step}"


def _max_step(lanes: Mapping[Lane, LanePolicy]) -> tuple[float, str] | None:
    """The limit for a step in seconds, and the SLO target it comes from."""
    found = []
    for lane, policy in lanes.items():
        if policy.itl_ms is not None:
            found.append((ITLS_PER_STEP * policy.itl_ms / 1000, f"itl_ms {policy.itl_ms:g} of lane {lane.name}"))
        if policy.ttft_ms is not None:
            part = policy.ttft_ms / 1000 / STEPS_PER_TTFT
            found.append((part, f"ttft_ms {policy.ttft_ms:g} of lane {lane.name}"))
    return min(found, default=None)


def _size_messages(facts: EngineFacts, *, step_too_long: bool) -> list[str | None]:
    most, chunk, engine_max = facts.max_sequences, facts.chunk_tokens, facts.engine_sequences
    messages: list[str | None] = []
    if engine_max is not None and most is not None and engine_max < most:
        fix = f"start it with --max-num-seqs {most} or" if facts.kind == "vllm" else "allow it more, or"
        messages.append(
            f"the engine runs {engine_max} sequences while others wait in its own queue, which ignores lanes, "
            f"and max_sequences is {most}; {fix} set max_sequences: {engine_max}"
        )
    if most is not None and chunk is not None and most > chunk:
        messages.append(
            f"max_sequences is {most}, but a step of {chunk} tokens can advance only {chunk} sequences; "
            f"set max_sequences: {chunk} or less"
        )
    if not step_too_long and facts.prefill_tokens is not None and chunk is not None and facts.prefill_tokens < chunk:
        messages.append(
            f"prefill_tokens is {facts.prefill_tokens}, less than the {chunk} tokens of one step, so steps never "
            f"fill; set prefill_tokens: {chunk} or more"
        )
    if facts.kv_capacity is not None and facts.kv_tokens is not None and facts.kv_tokens > facts.kv_capacity:
        messages.append(
            f"kv_tokens is {facts.kv_tokens}, but the KV cache holds {facts.kv_capacity} tokens; "
            f"set kv_tokens: {facts.kv_capacity}"
        )
    if facts.preempts:
        messages.append(
            "the engine preempts sequences because its KV cache is full; set kv_tokens or a lower max_sequences"
        )
    return messages


def _capability_messages(facts: EngineFacts) -> list[str | None]:
    messages: list[str | None] = []
    if facts.shares_cache:
        messages.append(
            "tenants share its prefix cache (isolation: none): the time to a first token can reveal what another "
            "tenant asked"
        )
    if facts.may_ignore_salts:
        messages.append(
            "the server does not call itself vLLM; if it ignores `cache_salt`, tenants share its prefix cache: use the "
            "kind of the server"
        )
    if facts.has_metrics is False:
        hint = " (start it with --enable-metrics)" if facts.kind == "sglang" else ""
        messages.append(
            f"the server has no metrics{hint}: load of other clients is unknown and cancels are not confirmed"
        )
    if facts.kind == "vllm" and facts.supports_priority is False:
        messages.append("the engine's own queue ignores lanes; start it with --scheduling-policy priority")
    if facts.kind == "vllm" and facts.reports_cached is False:
        messages.append(
            "the server does not report cached tokens, so whole prompts are counted; start it with "
            "--enable-prompt-tokens-details"
        )
    return messages
