"""What to change when an engine's own settings stand in the way of a lane's promise. Pure: facts in, sentences out."""

from collections.abc import Mapping

from msgspec import Struct

from inferry.domain.lanes import Lane, LanePolicy

FAST_PREFILL_TOKENS_PER_S = 40_000
"""Prompt tokens per second of an 8B model on a large GPU: slower engines only make a long step longer."""
GAPS_IN_A_STEP = 4
STEPS_IN_A_FIRST_TOKEN = 4
"""A step may take this many promised gaps, or this part of a promised first token, before it is called too long."""
SMALLEST_CHUNK = 256


class Facts(Struct, frozen=True, kw_only=True):
    """What is known of one worker; None where it is not.

    `chunk_tokens` is what a step computes at most. `engine_sequences` is how many the engine was seen to run while
    others waited inside it.
    """

    worker: str
    kind: str
    max_sequences: int | None = None
    prefill_tokens: int | None = None
    kv_tokens: int | None = None
    chunk_tokens: int | None = None
    engine_sequences: int | None = None
    kv_capacity: int | None = None
    preempts: bool = False
    has_metrics: bool | None = None
    orders: bool | None = None
    reports_cached: bool | None = None


def advice(facts: Facts, lanes: Mapping[Lane, LanePolicy]) -> list[str]:
    """Sentences for whoever runs the engine; none where nothing stands in the way."""
    too_long = _step(facts, lanes)
    said = (too_long, *_sizes(facts, is_too_long=too_long is not None), *_abilities(facts))
    return [f"worker {facts.worker}: {sentence}" for sentence in said if sentence]


def _step(facts: Facts, lanes: Mapping[Lane, LanePolicy]) -> str | None:
    chunk, promise = facts.chunk_tokens, _longest_step(lanes)
    if chunk is None or promise is None:
        return None
    limit_s, why = promise
    step_s = chunk / FAST_PREFILL_TOKENS_PER_S
    if step_s <= limit_s:
        return None
    better = SMALLEST_CHUNK
    while 2 * better * step_s / chunk <= limit_s:
        better *= 2
    flag = "start it with --max-num-batched-tokens" if facts.kind == "vllm" else "let it compute"
    return f"a step of {chunk} tokens takes {1000 * step_s:.0f} ms on a fast GPU, too long for {why}; {flag} {better}"


def _longest_step(lanes: Mapping[Lane, LanePolicy]) -> tuple[float, str] | None:
    """How long a step may take, and the promise that says so."""
    found = []
    for lane, policy in lanes.items():
        if policy.gap_ms is not None:
            found.append((GAPS_IN_A_STEP * policy.gap_ms / 1000, f"gap_ms {policy.gap_ms:g} of lane {lane.name}"))
        if policy.ttft_ms is not None:
            part = policy.ttft_ms / 1000 / STEPS_IN_A_FIRST_TOKEN
            found.append((part, f"ttft_ms {policy.ttft_ms:g} of lane {lane.name}"))
    return min(found, default=None)


def _sizes(facts: Facts, *, is_too_long: bool) -> list[str | None]:
    most, chunk, own = facts.max_sequences, facts.chunk_tokens, facts.engine_sequences
    said: list[str | None] = []
    if own is not None and most is not None and own < most:
        fix = f"start it with --max-num-seqs {most} or" if facts.kind == "vllm" else "allow it more, or"
        said.append(
            f"it runs {own} sequences at once while others wait inside it, where lanes do not count, "
            f"and max_sequences is {most}; {fix} set max_sequences: {own}"
        )
    if most is not None and chunk is not None and most > chunk:
        said.append(
            f"max_sequences is {most}, but a step of {chunk} tokens advances no more than {chunk} of them; "
            f"set max_sequences: {chunk} or less"
        )
    if not is_too_long and facts.prefill_tokens is not None and chunk is not None and facts.prefill_tokens < chunk:
        said.append(
            f"prefill_tokens is {facts.prefill_tokens}, less than the {chunk} tokens of one step, so that steps never "
            f"fill; set prefill_tokens: {chunk} or more"
        )
    if facts.kv_capacity is not None and facts.kv_tokens is not None and facts.kv_tokens > facts.kv_capacity:
        said.append(
            f"kv_tokens is {facts.kv_tokens}, but its cache holds {facts.kv_capacity} tokens; "
            f"set kv_tokens: {facts.kv_capacity}"
        )
    if facts.preempts:
        said.append("it runs out of KV cache and computes sequences anew; set kv_tokens, or a lower max_sequences")
    return said


def _abilities(facts: Facts) -> list[str | None]:
    said: list[str | None] = []
    if facts.has_metrics is False:
        how = " (start it with --enable-metrics)" if facts.kind == "sglang" else ""
        said.append(f"it shows no metrics{how}: load of others is not seen and cancels are not confirmed")
    if facts.kind == "vllm" and facts.orders is False:
        said.append("its own queue is not ordered by lane; start it with --scheduling-policy priority")
    if facts.kind == "vllm" and facts.reports_cached is False:
        said.append(
            "it does not report cached tokens, so that whole prompts count; start it with "
            "--enable-prompt-tokens-details"
        )
    return said
