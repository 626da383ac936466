"""How much of a worker the gateway may use now: room, computed from measured costs and from what lanes promise.

One controller per worker, owned by whoever feeds it. It is told what the gateway sees (jobs sent, first tokens, gaps,
ends) and answers with a `Room`; time is an argument, and the same inputs give the same answers.
"""

from collections.abc import Mapping
from math import exp, inf

from msgspec import Struct

from inferry.domain.jobs import Lane, LanePolicy
from inferry.domain.plans import Load, Room
from inferry.scheduling.rates import StepCosts

BEAT_S = 0.2
"""Costs and trim move once in a beat: long enough for several steps of any engine, short against a promise."""
QUIET_S = 1.0
"""A lane that has had nothing in flight for this long is quiet. Agents pause less between two steps."""
AHEAD = 0.25
"""The part of a first-token promise that prompts ahead may use; waiting in the gateway and surprises have the rest."""
AHEAD_WHEN_QUIET = 0.8
GAP_AIM = 0.8
"""The part of the gap promise that the mean gap is steered to: prompts come in lumps, and a lump must fit as well."""
DECODE_PART = 0.75
"""The part of a gap that decoding alone may take; the rest is for prompts."""
LEAST_PREFILL = 0.2
"""The part of engine time that prompts get when the gap promise cannot be kept whatever is done."""
COLD_PREFILL_TOKENS = 4096
KV_PART = 0.95
"""Outputs are estimates, so a little KV is kept back."""

CLOSE_BY = 0.8
OPEN_BY = 0.02
LEAST_TRIM = 0.3
FIRST_TOKEN_DANGER = 0.7
"""A first token that took this part of its promise on the worker is a warning: waiting before it is not in that."""
GAP_DANGER = 1.0
GAP_CALM = 0.85


class Promise(Struct, frozen=True, gc=False):
    ttft_s: float
    gap_s: float


class _Flow:
    """What one lane has on the worker."""

    __slots__ = ("busy_at", "decoding", "gap_s", "gap_weight", "prefilling", "promise")

    def __init__(self, promise: Promise | None) -> None:
        self.promise = promise
        self.prefilling = 0
        self.decoding = 0
        self.busy_at = -inf
        self.gap_s = 0.0
        self.gap_weight = 0.0

    def is_quiet(self, now: float) -> bool:
        return not self.prefilling and not self.decoding and now - self.busy_at >= QUIET_S


class RoomController:
    """See the module. `limits` are what the worker can hold at most; `chunk_tokens` what it computes in one step."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy], limits: Room, chunk_tokens: int | None = None) -> None:
        self._flows = {lane: _Flow(_promise(policy)) for lane, policy in lanes.items()}
        self._live = [flow for flow in self._flows.values() if flow.promise is not None]
        self._limits = limits
        self._chunk_tokens = chunk_tokens
        self._load = Load()
        self._typical_prompt = 0.0
        self._at: float | None = None
        self._clear_beat()
        self.costs = StepCosts()
        self.trim = 1.0

    def _clear_beat(self) -> None:
        self._elapsed_s = self._busy_s = self._decoding_s = self._sequence_s = 0.0
        self._gaps = self._gaps_s = self._prompt_tokens = 0.0
        self._warned = False

    # What it is told.

    def sent(self, prefill_tokens: int, lane: Lane, now: float) -> None:
        """A job went to the worker, with so many prompt tokens to compute as the gateway counts them."""
        self._pass(now)
        self._flows[lane].prefilling += 1
        weight = 0.1 if self._typical_prompt else 1.0
        self._typical_prompt += weight * (prefill_tokens - self._typical_prompt)

    def first_token(self, lane: Lane, prefill_tokens: int, sent_at: float, now: float) -> None:
        """The job's prompt is computed; `prefill_tokens` is what `sent` was told."""
        self._pass(now)
        flow = self._flows[lane]
        flow.prefilling -= 1
        flow.decoding += 1
        self._prompt_tokens += prefill_tokens
        if flow.promise is not None:
            own_s = prefill_tokens * self.costs.prompt_s
            # A prompt that fills its promise by itself says nothing about what was ahead of it.
            if now - sent_at - own_s > FIRST_TOKEN_DANGER * max(0.0, flow.promise.ttft_s - own_s):
                self._warned = True

    def gaps(self, lane: Lane, count: int, total_s: float) -> None:
        """So many gaps between tokens, and their sum. A sample will do."""
        if count <= 0:
            return
        self._gaps += count
        self._gaps_s += total_s
        flow = self._flows[lane]
        flow.gap_s += total_s
        flow.gap_weight += count

    def ended(self, lane: Lane, now: float, *, had_first_token: bool = True) -> None:
        """A job that was sent is over, well or not."""
        self._pass(now)
        flow = self._flows[lane]
        if had_first_token:
            flow.decoding -= 1
        else:
            flow.prefilling -= 1

    def observe(self, load: Load) -> None:
        """What the worker says of itself, if it says anything."""
        self._load = load

    # What it answers.

    def room(self, now: float) -> Room:
        self._pass(now)
        if self._elapsed_s >= BEAT_S:
            self._end_beat()
        limits = self._limits
        kv_tokens = None if limits.kv_tokens is None else max(1, int(limits.kv_tokens * KV_PART))
        if not self.costs.known:
            return Room(limits.sequences, kv_tokens, self._within(COLD_PREFILL_TOKENS, limits.prefill_tokens), None)
        awake = [flow.promise for flow in self._live if flow.promise and not flow.is_quiet(now)]
        everyone = [flow.promise for flow in self._live if flow.promise]
        return Room(
            self._sequences(awake or everyone),
            kv_tokens,
            self._prefill_tokens(awake, everyone),
            self._prefill_tokens_per_s(awake),
        )

    def _prefill_tokens_per_s(self, awake: list[Promise]) -> float | None:
        """A step of d seconds becomes g = d / (1 - r / R) with r of R prompt tokens a second: hold g at the promise."""
        if not awake:
            return self._limits.prefill_tokens_per_s
        step_s = self.costs.step_s(self._decoding_now())
        gap_s = max(GAP_AIM * min(promise.gap_s for promise in awake), step_s / (1 - LEAST_PREFILL))
        rate = self.costs.prompt_tokens_per_s * (1 - step_s / gap_s) * self.trim
        limit = self._limits.prefill_tokens_per_s
        return rate if limit is None else min(rate, limit)

    def _prefill_tokens(self, awake: list[Promise], everyone: list[Promise]) -> int | None:
        """As many prompt tokens as clear before a prompt that comes now, in the time its promise leaves them."""
        limit = self._limits.prefill_tokens
        if not everyone:
            return limit
        step_s = self.costs.step_s(self._decoding_now())
        token_s = self.costs.prompt_s + (step_s / self._chunk_tokens if self._chunk_tokens else 0.0)
        ttft_s = min(promise.ttft_s for promise in awake or everyone)
        slack_s = ttft_s - self._typical_prompt * token_s - step_s
        part = AHEAD * self.trim if awake else AHEAD_WHEN_QUIET
        return self._within(part * slack_s / token_s, limit)

    def _sequences(self, promises: list[Promise]) -> int | None:
        """As many as can decode without prompts taking their part of the gap.

        Where even one step breaks the promise, up to where a step takes twice as long as an empty one: the promise is
        lost, and more than that would not be gained.
        """
        limit = self._limits.sequences
        costs = self.costs
        if not promises or costs.token_s <= 0:
            return limit
        step_s = max(DECODE_PART * min(promise.gap_s for promise in promises), 2 * costs.base_s)
        return _clamp((step_s - costs.base_s) / costs.token_s, 1, limit)

    def _within(self, tokens: float, limit: int | None) -> int:
        """Never less than a typical job: a bound that stops everything protects nobody."""
        return _clamp(max(tokens, self._typical_prompt), 1, limit)

    # What it remembers.

    def _pass(self, now: float) -> None:
        """Time passed with what was in flight until now."""
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now if self._at is None else max(now, self._at)
        if passed <= 0:
            return
        decoding = prefilling = 0
        for flow in self._flows.values():
            if flow.decoding or flow.prefilling:
                flow.busy_at = self._at
                decoding += flow.decoding
                prefilling += flow.prefilling
        self._elapsed_s += passed
        if decoding or prefilling:
            self._busy_s += passed
        if decoding:
            self._decoding_s += passed
            self._sequence_s += passed * decoding

    def _end_beat(self) -> None:
        """Learn what the beat cost, and trim where a promise was in danger."""
        if self._gaps and self._gaps_s > 0:
            steps = self._decoding_s * self._gaps / self._gaps_s
            tokens = self._sequence_s * self._gaps / self._gaps_s
            self.costs.add(self._elapsed_s, self._busy_s, steps, tokens, self._prompt_tokens)
        elif not self._decoding_s:
            self.costs.add(self._elapsed_s, self._busy_s, 0.0, 0.0, self._prompt_tokens)
        worst = self._worst_gap()
        if self._warned or worst > GAP_DANGER:
            self.trim = max(LEAST_TRIM, self.trim * CLOSE_BY)
        elif worst < GAP_CALM:
            self.trim = min(1.0, self.trim + OPEN_BY)
        keep = exp(-self._elapsed_s)
        for flow in self._live:
            flow.gap_s *= keep
            flow.gap_weight *= keep
        self._clear_beat()

    def _worst_gap(self) -> float:
        """The mean gap of the last second, as a part of what was promised, where that is largest."""
        parts = [
            flow.gap_s / flow.gap_weight / flow.promise.gap_s
            for flow in self._live
            if flow.promise and flow.decoding and flow.gap_weight > 0
        ]
        return max(parts, default=0.0)

    def _decoding_now(self) -> int:
        own = sum(flow.decoding for flow in self._flows.values())
        prefilling = sum(flow.prefilling for flow in self._flows.values())
        return own + max(0, self._load.running + self._load.waiting - own - prefilling)


def _promise(policy: LanePolicy) -> Promise | None:
    if policy.ttft_ms is None or policy.gap_ms is None:
        return None
    return Promise(policy.ttft_ms / 1000, policy.gap_ms / 1000)


def _clamp(value: float, least: int, most: int | None) -> int:
    whole = int(min(value, 1e12))
    return max(least, whole if most is None else min(whole, most))
