"""How much of a worker the gateway may use now: room, computed from measured costs and from what lanes promise.

One controller per worker, owned by whoever feeds it. It is told what the gateway sees (jobs sent, first tokens, tokens,
ends) and answers with a `Capacity`; time is an argument, and the same inputs give the same answers.

A stream that is promised its first token within `ttft` and the others a `gap` apart has slack: the time until its next
token is due. Whatever an engine does besides decoding that stream costs it slack, and idle moments give it some. So the
gap that prompts may stretch a step to follows from the least slack of all live streams, and the rate of prompts from
that gap and from what steps and prompts were measured to cost. The loop closes by itself: slack that was lost to a
wrong estimate narrows the next answer, slack that was gained widens it.

Work that promises nothing may use what keeps the slack of live streams at fourteen gaps. Live prompts that are paced
may eat into it down to twelve, and to five as their own first tokens come due: they have a promise of their own to
keep, and for such moments it is saved. That holds for the streams of better lanes and for those of their own.
"""

from collections.abc import Mapping, Sequence
from math import exp, inf

from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.workers import Capacity, EngineCounts, Load
from inferry.scheduling.capacity.step_costs import MEMORY_S, StepCostModel

LEARNING_INTERVAL_S = 0.1
"""Costs are learned once in a beat: long enough for several steps of most engines, short against a promise."""
IDLE_AFTER_S = 1.0
"""A lane that has had nothing in flight for this long is quiet. Agents pause less between two steps."""
PREFILL_TTFT_FRACTION = 0.5
"""The part of a first-token promise that prompts ahead may use; waiting in the gateway and surprises have the rest."""
PREFILL_TTFT_FRACTION_IDLE = 1.0
"""All of it: work without promises leaves its lane's reserve of that, and nobody is there yet who could be late."""
SLACK_SPEND_S = 1.0
SLACK_RECOVERY_S = 0.4
"""Slack above what is kept is spent over the one, slack below it earned back over the other: losing a promise takes one
long step, and costs are estimates.
"""
MIN_SPEND_FRACTION = 0.3
"""As live prompts come due, slack is spent for them in less and less time, down to this part of it."""
BATCH_SLACK_ITLS = 14
"""How many gaps' worth of slack streams keep while only work without promises comes."""
PACED_SLACK_ITLS = 12
"""How many they keep while live prompts that are paced come."""
MIN_SLACK_ITLS = 5
"""How many they keep whatever comes: steps are not equally long, and prompts are sent before it is known."""
URGENT_FRACTION = 0.7
"""When the live job that has waited longest for the pace has less than this part of its first-token promise left, less
and less is kept from it."""
MAX_SLOWDOWN = 0.8
MAX_SPEEDUP = 0.8
"""How much slower or faster than promised tokens may be wanted, as parts of these."""
DECODE_FRACTION = 0.5
"""The part of a gap that decoding may take before work without promises is kept out; the rest is for prompts."""
MIN_PREFILL_FRACTION = 0.15
"""The part of engine time that prompts get when the gap promise cannot be kept whatever is done."""
COUNTS_VALID_S = 3.0
"""An engine that has not said for so long what it has done is judged by what comes out of it."""
MIN_RATIO_TOKENS = 5000
MAX_TOKEN_RATIO = 4.0
"""How far apart the gateway's count of prompt tokens and the engine's may be believed to be, once there are enough."""
INITIAL_PREFILL_TOKENS = 4096
KV_FRACTION = 0.95
"""Outputs are estimates, so a little KV is kept back."""


class Stream:
    """A job that decodes. Whoever feeds the controller counts up `tokens` as they come."""

    __slots__ = ("arrived_at", "learned_tokens", "tokens")

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.tokens = 1
        self.learned_tokens = 1


class _LaneActivity:
    """What one lane has on the worker."""

    __slots__ = ("last_busy_at", "prefilling", "slack_s", "streams", "waiting_since")

    def __init__(self) -> None:
        self.waiting_since: float | None = None
        self.prefilling = 0
        self.streams: dict[Stream, None] = {}
        self.last_busy_at = -inf
        self.slack_s = inf

    def is_idle(self, now: float) -> bool:
        if self.prefilling or self.streams or self.waiting_since is not None:
            return False
        return now - self.last_busy_at >= IDLE_AFTER_S


class _SloLaneActivity(_LaneActivity):
    """A lane that promises something."""

    __slots__ = ("itl_s", "ttft_s")

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        super().__init__()
        self.ttft_s = ttft_s
        self.itl_s = itl_s

    def update_slack(self, now: float) -> None:
        """Note the least slack of the streams that can still keep their promise."""
        from_arrival, itl_s = self.ttft_s - now, self.itl_s
        least = inf
        for stream in self.streams:
            slack = stream.arrived_at + from_arrival + itl_s * stream.tokens
            if 0.0 <= slack < least:
                least = slack
        self.slack_s = least

    def ttft_left_fraction(self, now: float) -> float:
        """The part of its first-token promise that the job which has waited longest has left."""
        if self.waiting_since is None:
            return 1.0
        return max(0.0, 1.0 - (now - self.waiting_since) / self.ttft_s)

    def target_itl_s(self, keep: float, spend_s: float = SLACK_SPEND_S) -> float:
        """How far apart tokens may come for the next moment, if slack is to come to `keep` gaps."""
        if self.slack_s == inf:
            return self.itl_s
        spare_s = self.slack_s - keep * self.itl_s
        if spare_s > 0:
            return self.itl_s / (1.0 - min(MAX_SLOWDOWN, spare_s / spend_s))
        return self.itl_s / (1.0 + min(MAX_SPEEDUP, -spare_s / SLACK_RECOVERY_S))


class CapacityController:
    """See the module. `limits` are what the worker can hold at most; `chunk_tokens` what it computes in one step."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy], limits: Capacity, chunk_tokens: int | None = None) -> None:
        self._activities = {lane: _activity_for(lanes[lane]) for lane in sorted(lanes)}
        self._slo_lanes = [activity for activity in self._activities.values() if isinstance(activity, _SloLaneActivity)]
        self._limits = limits
        self._chunk_tokens = chunk_tokens
        self._load = Load()
        self._typical_prompt_tokens = 0.0
        self._advanced_at: float | None = None
        self._counts: EngineCounts | None = None
        self._counted_at = -inf
        self._estimated_tokens = self._counted_tokens = 0.0
        self._elapsed_s = self._busy_s = 0.0
        self._start_interval()
        self.costs = StepCostModel()

    # What it is told.

    def sent(self, lane: Lane, prefill_tokens: int, now: float) -> None:
        """A job went to the worker, with so many prompt tokens to compute as the gateway counts them."""
        self._advance(now)
        self._activities[lane].prefilling += 1
        weight = 0.1 if self._typical_prompt_tokens else 1.0
        self._typical_prompt_tokens += weight * (prefill_tokens - self._typical_prompt_tokens)

    def first_token(self, lane: Lane, prefill_tokens: int, arrived_at: float, now: float) -> Stream:
        """The job's prompt is computed: as many tokens as `sent` was told, or as are known by now to have been."""
        self._advance(now)
        activity = self._activities[lane]
        activity.prefilling -= 1
        self._prompt_tokens += prefill_tokens
        stream = Stream(arrived_at)
        activity.streams[stream] = None
        return stream

    def ended(self, lane: Lane, stream: Stream | None, now: float) -> None:
        """A job that was sent is over, well or not; without a stream if it never had its first token."""
        self._advance(now)
        activity = self._activities[lane]
        if stream is None:
            activity.prefilling -= 1
        else:
            del activity.streams[stream]
            self._ended_tokens += stream.tokens - stream.learned_tokens

    def waiting(self, lane: Lane, since: float | None) -> None:
        """When the job came that has waited longest in the lane for this worker or another, if any waits."""
        self._activities[lane].waiting_since = since

    def observe(self, load: Load) -> None:
        """What the worker says of itself, if it says anything."""
        self._load = load

    def observe_counts(self, counts: EngineCounts, now: float) -> None:
        """What the engine says it has done. Steps and tokens seen from outside are a guess beside that: tokens travel
        together, and how much of a prompt was cached is not known for certain.
        """
        last, self._counts = self._counts, counts
        if counts == last:
            return
        self._advance(now)
        since_s, busy_since_s = self._trim_interval(now)
        is_fresh = last is not None and now - self._counted_at <= COUNTS_VALID_S
        self._counted_at = now
        if last is not None and is_fresh and counts.steps >= last.steps:
            prompt_tokens = max(0, counts.prompt_tokens - last.prompt_tokens)
            output_tokens = max(0, counts.output_tokens - last.output_tokens)
            self.costs.add(self._elapsed_s, self._busy_s, counts.steps - last.steps, output_tokens, prompt_tokens)
            keep = exp(-self._elapsed_s / MEMORY_S)
            self._estimated_tokens = self._estimated_tokens * keep + self._prompt_tokens
            self._counted_tokens = self._counted_tokens * keep + prompt_tokens
        self._start_interval()
        self._elapsed_s, self._busy_s = since_s, busy_since_s

    def limit(self, limits: Capacity, chunk_tokens: int | None = None) -> None:
        """What the worker can hold is another by now, or known better."""
        self._limits = limits
        self._chunk_tokens = chunk_tokens

    # What it answers.

    def capacity(self, now: float) -> Capacity:
        self._advance(now)
        if self._elapsed_s >= LEARNING_INTERVAL_S and now - self._counted_at > COUNTS_VALID_S:
            self._learn()
        limits = self._limits
        kv_tokens = None if limits.kv_tokens is None else max(1, int(limits.kv_tokens * KV_FRACTION))
        if not self.costs.known:
            return Capacity(
                limits.sequences, kv_tokens, self._clamp_prefill(INITIAL_PREFILL_TOKENS, limits.prefill_tokens)
            )
        active = [activity for activity in self._slo_lanes if not activity.is_idle(now)]
        for activity in active:
            activity.update_slack(now)
        step_s = self.costs.step_s(self._decoding_now())
        return Capacity(
            limits.sequences,
            kv_tokens,
            self._prefill_tokens(active, step_s),
            self._prefill_tokens_per_s(active, step_s, now),
            self._batch_sequences(active),
        )

    def slack_s(self, lane: Lane) -> float:
        """The least slack of the lane's streams when it was last looked at; infinite where there are none."""
        return self._activities[lane].slack_s

    def _prefill_tokens_per_s(self, active: Sequence[_SloLaneActivity], step_s: float, now: float) -> float | None:
        """A step of d seconds becomes g = d / (1 - r / R) with r of R prompt tokens a second: solved for r."""
        limit = self._limits.prefill_tokens_per_s
        itl_s = inf
        live_prompts = False
        ttft_left_fraction = 1.0
        best = next((activity for activity in active if activity.streams), None)
        for activity in reversed(active):
            if activity is not best:  # whose own prompts are not paced
                live_prompts = live_prompts or activity.prefilling > 0 or activity.waiting_since is not None
                ttft_left_fraction = min(ttft_left_fraction, activity.ttft_left_fraction(now))
            urgency = min(1.0, ttft_left_fraction / URGENT_FRACTION)
            keep = max(MIN_SLACK_ITLS, PACED_SLACK_ITLS * urgency) if live_prompts else BATCH_SLACK_ITLS
            itl_s = min(itl_s, activity.target_itl_s(keep, SLACK_SPEND_S * max(MIN_SPEND_FRACTION, urgency)))
        if itl_s == inf:
            return limit
        fraction = max(MIN_PREFILL_FRACTION, 1 - step_s / itl_s)
        rate = self.costs.prompt_tokens_per_s * fraction * self._token_ratio()
        return rate if limit is None else min(rate, limit)

    def _prefill_tokens(self, active: Sequence[_SloLaneActivity], step_s: float) -> int | None:
        """As many prompt tokens as clear before a prompt that comes now, in the time its promise leaves them."""
        limit = self._limits.prefill_tokens
        if not self._slo_lanes:
            return limit
        token_s = self.costs.prompt_s + (step_s / self._chunk_tokens if self._chunk_tokens else 0.0)
        ttft_s = min(activity.ttft_s for activity in active or self._slo_lanes)
        slack_s = ttft_s - self._typical_prompt_tokens / self._token_ratio() * token_s - step_s
        return self._clamp_prefill(
            (PREFILL_TTFT_FRACTION if active else PREFILL_TTFT_FRACTION_IDLE) * slack_s / token_s * self._token_ratio(),
            limit,
        )

    def _token_ratio(self) -> float:
        """Prompt tokens as the gateway counts them, for each one that the engine computes: what is cached is a belief,
        and rooms are spent in what is believed.
        """
        if self._counted_tokens < MIN_RATIO_TOKENS or self._estimated_tokens < MIN_RATIO_TOKENS:
            return 1.0
        return min(MAX_TOKEN_RATIO, max(1 / MAX_TOKEN_RATIO, self._estimated_tokens / self._counted_tokens))

    def _batch_sequences(self, active: Sequence[_SloLaneActivity]) -> int | None:
        """As many sequences as decode in their part of the gap wanted, or in all of it while live lanes are quiet.

        Where even one step breaks the promise, up to where a step takes twice as long as an empty one: the promise is
        lost, and more than that would not be gained.
        """
        limit, costs = self._limits.sequences, self.costs
        if not self._slo_lanes or costs.token_s <= 0:
            return limit
        if active:
            step_s = DECODE_FRACTION * min(activity.target_itl_s(BATCH_SLACK_ITLS) for activity in active)
        else:
            step_s = min(activity.itl_s for activity in self._slo_lanes)
        step_s = max(step_s, 2 * costs.base_s)
        return _clamp((step_s - costs.base_s) / costs.token_s, 1, limit)

    def _clamp_prefill(self, tokens: float, limit: int | None) -> int:
        """Never less than a typical job: a bound that stops everything protects nobody."""
        return _clamp(max(tokens, self._typical_prompt_tokens), 1, limit)

    # What it remembers.

    def _advance(self, now: float) -> None:
        """Time passed with what was in flight until now."""
        at = self._advanced_at
        if at is None:
            self._advanced_at = now
            return
        elapsed = now - at
        if elapsed <= 0:
            return
        self._advanced_at = now
        decoding = 0
        busy = False
        for activity in self._activities.values():
            if activity.streams or activity.prefilling:
                activity.last_busy_at = now
                busy = True
                decoding += len(activity.streams)
        self._elapsed_s += elapsed
        if busy:
            self._busy_s += elapsed
            if decoding:
                self._decoding_s += elapsed
                self._stream_seconds += elapsed * decoding

    def _trim_interval(self, at: float) -> tuple[float, float]:
        """Counts are as old as when they were read: take from the beat what passed since, and return it."""
        since_s = min(self._elapsed_s, max(0.0, (at if self._advanced_at is None else self._advanced_at) - at))
        if since_s <= 0:
            return 0.0, 0.0
        busy_since_s = self._busy_s * since_s / self._elapsed_s
        self._elapsed_s -= since_s
        self._busy_s -= busy_since_s
        return since_s, busy_since_s

    def _start_interval(self) -> None:
        self._elapsed_s = self._busy_s = self._decoding_s = self._stream_seconds = self._prompt_tokens = 0.0
        self._ended_tokens = 0

    def _learn(self) -> None:
        """What the last beats cost. Every stream has a token in every step: so many steps as tokens for each."""
        tokens = self._ended_tokens
        for activity in self._activities.values():
            for stream in activity.streams:
                tokens += stream.tokens - stream.learned_tokens
                stream.learned_tokens = stream.tokens
        steps = tokens * self._decoding_s / self._stream_seconds if self._stream_seconds else 0.0
        self.costs.add(self._elapsed_s, self._busy_s, steps, tokens, self._prompt_tokens)
        self._start_interval()

    def _decoding_now(self) -> int:
        own = sum([len(activity.streams) for activity in self._activities.values()])
        prefilling = sum([activity.prefilling for activity in self._activities.values()])
        return own + max(0, self._load.running + self._load.waiting - own - prefilling)


def _activity_for(policy: LanePolicy) -> _LaneActivity:
    if policy.ttft_ms is None or policy.itl_ms is None:
        return _LaneActivity()
    return _SloLaneActivity(policy.ttft_ms / 1000, policy.itl_ms / 1000)


def _clamp(value: float, least: int, maximum: int | None) -> int:
    rounded = int(min(value, 1e12))
    return max(least, rounded if maximum is None else min(rounded, maximum))
