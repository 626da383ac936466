"""How much of a worker the gateway may use now: room, computed from measured costs and from what lanes promise.

One controller per worker, owned by whoever feeds it. It is told what the gateway sees (jobs sent, first tokens, tokens,
ends) and answers with a `Room`; time is an argument, and the same inputs give the same answers.

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
from inferry.domain.workers import EngineCounts, Load, Room
from inferry.scheduling.rates import MEMORY_S, StepCosts

BEAT_S = 0.1
"""Costs are learned once in a beat: long enough for several steps of most engines, short against a promise."""
QUIET_S = 1.0
"""A lane that has had nothing in flight for this long is quiet. Agents pause less between two steps."""
AHEAD = 0.5
"""The part of a first-token promise that prompts ahead may use; waiting in the gateway and surprises have the rest."""
AHEAD_WHEN_QUIET = 1.0
"""All of it: work without promises leaves its lane's reserve of that, and nobody is there yet who could be late."""
SPEND_S = 1.0
EARN_S = 0.4
"""Slack above what is kept is spent over the one, slack below it earned back over the other: losing a promise takes one
long step, and costs are estimates.
"""
SPEND_AT_LEAST = 0.3
"""As live prompts come due, slack is spent for them in less and less time, down to this part of it."""
KEEP = 14
"""How many gaps' worth of slack streams keep while only work without promises comes."""
KEEP_FROM_LIVE = 12
"""How many they keep while live prompts that are paced come."""
KEEP_AT_LEAST = 5
"""How many they keep whatever comes: steps are not equally long, and prompts are sent before it is known."""
URGENT = 0.7
"""When the live job that has waited longest for the pace has less than this part of its first-token promise left, less
and less is kept from it."""
MOST_SPENT = 0.8
MOST_EARNED = 0.8
"""How much slower or faster than promised tokens may be wanted, as parts of these."""
DECODE_PART = 0.5
"""The part of a gap that decoding may take before work without promises is kept out; the rest is for prompts."""
LEAST_PREFILL = 0.15
"""The part of engine time that prompts get when the gap promise cannot be kept whatever is done."""
COUNTS_LAST_S = 3.0
"""An engine that has not said for so long what it has done is judged by what comes out of it."""
ENOUGH_TOKENS = 5000
MOST_MISCOUNTED = 4.0
"""How far apart the gateway's count of prompt tokens and the engine's may be believed to be, once there are enough."""
COLD_PREFILL_TOKENS = 4096
KV_PART = 0.95
"""Outputs are estimates, so a little KV is kept back."""


class Stream:
    """A job that decodes. Whoever feeds the controller counts up `tokens` as they come."""

    __slots__ = ("arrived_at", "learned", "tokens")

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.tokens = 1
        self.learned = 1


class _Flow:
    """What one lane has on the worker."""

    __slots__ = ("busy_at", "prefilling", "slack_s", "streams", "waiting_since")

    def __init__(self) -> None:
        self.waiting_since: float | None = None
        self.prefilling = 0
        self.streams: dict[Stream, None] = {}
        self.busy_at = -inf
        self.slack_s = inf

    def is_quiet(self, now: float) -> bool:
        if self.prefilling or self.streams or self.waiting_since is not None:
            return False
        return now - self.busy_at >= QUIET_S


class _Live(_Flow):
    """A lane that promises something."""

    __slots__ = ("gap_s", "ttft_s")

    def __init__(self, ttft_s: float, gap_s: float) -> None:
        super().__init__()
        self.ttft_s = ttft_s
        self.gap_s = gap_s

    def look(self, now: float) -> None:
        """Note the least slack of the streams that can still keep their promise."""
        from_arrival, gap_s = self.ttft_s - now, self.gap_s
        least = inf
        for stream in self.streams:
            slack = stream.arrived_at + from_arrival + gap_s * stream.tokens
            if 0.0 <= slack < least:
                least = slack
        self.slack_s = least

    def patience(self, now: float) -> float:
        """The part of its first-token promise that the job which has waited longest has left."""
        if self.waiting_since is None:
            return 1.0
        return max(0.0, 1.0 - (now - self.waiting_since) / self.ttft_s)

    def gap_wanted_s(self, keep: float, spend_s: float = SPEND_S) -> float:
        """How far apart tokens may come for the next moment, if slack is to come to `keep` gaps."""
        if self.slack_s == inf:
            return self.gap_s
        spare_s = self.slack_s - keep * self.gap_s
        if spare_s > 0:
            return self.gap_s / (1.0 - min(MOST_SPENT, spare_s / spend_s))
        return self.gap_s / (1.0 + min(MOST_EARNED, -spare_s / EARN_S))


class RoomController:
    """See the module. `limits` are what the worker can hold at most; `chunk_tokens` what it computes in one step."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy], limits: Room, chunk_tokens: int | None = None) -> None:
        self._flows = {lane: _flow(lanes[lane]) for lane in sorted(lanes)}
        self._live = [flow for flow in self._flows.values() if isinstance(flow, _Live)]
        self._limits = limits
        self._chunk_tokens = chunk_tokens
        self._load = Load()
        self._typical_prompt = 0.0
        self._at: float | None = None
        self._counts: EngineCounts | None = None
        self._counted_at = -inf
        self._believed_tokens = self._real_tokens = 0.0
        self._elapsed_s = self._busy_s = 0.0
        self._start_beat()
        self.costs = StepCosts()

    # What it is told.

    def sent(self, lane: Lane, prefill_tokens: int, now: float) -> None:
        """A job went to the worker, with so many prompt tokens to compute as the gateway counts them."""
        self._pass(now)
        self._flows[lane].prefilling += 1
        weight = 0.1 if self._typical_prompt else 1.0
        self._typical_prompt += weight * (prefill_tokens - self._typical_prompt)

    def first_token(self, lane: Lane, prefill_tokens: int, arrived_at: float, now: float) -> Stream:
        """The job's prompt is computed: as many tokens as `sent` was told, or as are known by now to have been."""
        self._pass(now)
        flow = self._flows[lane]
        flow.prefilling -= 1
        self._prompt_tokens += prefill_tokens
        stream = Stream(arrived_at)
        flow.streams[stream] = None
        return stream

    def ended(self, lane: Lane, stream: Stream | None, now: float) -> None:
        """A job that was sent is over, well or not; without a stream if it never had its first token."""
        self._pass(now)
        flow = self._flows[lane]
        if stream is None:
            flow.prefilling -= 1
        else:
            del flow.streams[stream]
            self._tokens_of_ended += stream.tokens - stream.learned

    def waiting(self, lane: Lane, since: float | None) -> None:
        """When the job came that has waited longest in the lane for this worker or another, if any waits."""
        self._flows[lane].waiting_since = since

    def observe(self, load: Load) -> None:
        """What the worker says of itself, if it says anything."""
        self._load = load

    def count(self, counts: EngineCounts, now: float) -> None:
        """What the engine says it has done. Steps and tokens seen from outside are a guess beside that: tokens travel
        together, and how much of a prompt was cached is not known for certain.
        """
        last, self._counts = self._counts, counts
        if counts == last:
            return
        self._pass(now)
        since_s, busy_since_s = self._cut_beat(now)
        fresh = last is not None and now - self._counted_at <= COUNTS_LAST_S
        self._counted_at = now
        if last is not None and fresh and counts.steps >= last.steps:
            prompt_tokens = max(0, counts.prompt_tokens - last.prompt_tokens)
            output_tokens = max(0, counts.output_tokens - last.output_tokens)
            self.costs.add(self._elapsed_s, self._busy_s, counts.steps - last.steps, output_tokens, prompt_tokens)
            keep = exp(-self._elapsed_s / MEMORY_S)
            self._believed_tokens = self._believed_tokens * keep + self._prompt_tokens
            self._real_tokens = self._real_tokens * keep + prompt_tokens
        self._start_beat()
        self._elapsed_s, self._busy_s = since_s, busy_since_s

    def limit(self, limits: Room, chunk_tokens: int | None = None) -> None:
        """What the worker can hold is another by now, or known better."""
        self._limits = limits
        self._chunk_tokens = chunk_tokens

    # What it answers.

    def room(self, now: float) -> Room:
        self._pass(now)
        if self._elapsed_s >= BEAT_S and now - self._counted_at > COUNTS_LAST_S:
            self._learn()
        limits = self._limits
        kv_tokens = None if limits.kv_tokens is None else max(1, int(limits.kv_tokens * KV_PART))
        if not self.costs.known:
            return Room(limits.sequences, kv_tokens, self._within(COLD_PREFILL_TOKENS, limits.prefill_tokens))
        awake = [flow for flow in self._live if not flow.is_quiet(now)]
        for flow in awake:
            flow.look(now)
        step_s = self.costs.step_s(self._decoding_now())
        return Room(
            limits.sequences,
            kv_tokens,
            self._prefill_tokens(awake, step_s),
            self._prefill_tokens_per_s(awake, step_s, now),
            self._batch_sequences(awake),
        )

    def slack_s(self, lane: Lane) -> float:
        """The least slack of the lane's streams when it was last looked at; infinite where there are none."""
        return self._flows[lane].slack_s

    def _prefill_tokens_per_s(self, awake: Sequence[_Live], step_s: float, now: float) -> float | None:
        """A step of d seconds becomes g = d / (1 - r / R) with r of R prompt tokens a second: solved for r."""
        limit = self._limits.prefill_tokens_per_s
        gap_s = inf
        live_prompts = False
        patience = 1.0
        best = next((flow for flow in awake if flow.streams), None)
        for flow in reversed(awake):
            if flow is not best:  # whose own prompts are not paced
                live_prompts = live_prompts or flow.prefilling > 0 or flow.waiting_since is not None
                patience = min(patience, flow.patience(now))
            urgency = min(1.0, patience / URGENT)
            keep = max(KEEP_AT_LEAST, KEEP_FROM_LIVE * urgency) if live_prompts else KEEP
            gap_s = min(gap_s, flow.gap_wanted_s(keep, SPEND_S * max(SPEND_AT_LEAST, urgency)))
        if gap_s == inf:
            return limit
        part = max(LEAST_PREFILL, 1 - step_s / gap_s)
        rate = self.costs.prompt_tokens_per_s * part * self._exchange()
        return rate if limit is None else min(rate, limit)

    def _prefill_tokens(self, awake: Sequence[_Live], step_s: float) -> int | None:
        """As many prompt tokens as clear before a prompt that comes now, in the time its promise leaves them."""
        limit = self._limits.prefill_tokens
        if not self._live:
            return limit
        token_s = self.costs.prompt_s + (step_s / self._chunk_tokens if self._chunk_tokens else 0.0)
        ttft_s = min(flow.ttft_s for flow in awake or self._live)
        slack_s = ttft_s - self._typical_prompt / self._exchange() * token_s - step_s
        return self._within((AHEAD if awake else AHEAD_WHEN_QUIET) * slack_s / token_s * self._exchange(), limit)

    def _exchange(self) -> float:
        """Prompt tokens as the gateway counts them, for each one that the engine computes: what is cached is a belief,
        and rooms are spent in what is believed.
        """
        if self._real_tokens < ENOUGH_TOKENS or self._believed_tokens < ENOUGH_TOKENS:
            return 1.0
        return min(MOST_MISCOUNTED, max(1 / MOST_MISCOUNTED, self._believed_tokens / self._real_tokens))

    def _batch_sequences(self, awake: Sequence[_Live]) -> int | None:
        """As many sequences as decode in their part of the gap wanted, or in all of it while live lanes are quiet.

        Where even one step breaks the promise, up to where a step takes twice as long as an empty one: the promise is
        lost, and more than that would not be gained.
        """
        limit, costs = self._limits.sequences, self.costs
        if not self._live or costs.token_s <= 0:
            return limit
        if awake:
            step_s = DECODE_PART * min(flow.gap_wanted_s(KEEP) for flow in awake)
        else:
            step_s = min(flow.gap_s for flow in self._live)
        step_s = max(step_s, 2 * costs.base_s)
        return _clamp((step_s - costs.base_s) / costs.token_s, 1, limit)

    def _within(self, tokens: float, limit: int | None) -> int:
        """Never less than a typical job: a bound that stops everything protects nobody."""
        return _clamp(max(tokens, self._typical_prompt), 1, limit)

    # What it remembers.

    def _pass(self, now: float) -> None:
        """Time passed with what was in flight until now."""
        at = self._at
        if at is None:
            self._at = now
            return
        passed = now - at
        if passed <= 0:
            return
        self._at = now
        decoding = 0
        busy = False
        for flow in self._flows.values():
            if flow.streams or flow.prefilling:
                flow.busy_at = now
                busy = True
                decoding += len(flow.streams)
        self._elapsed_s += passed
        if busy:
            self._busy_s += passed
            if decoding:
                self._decoding_s += passed
                self._stream_s += passed * decoding

    def _cut_beat(self, at: float) -> tuple[float, float]:
        """Counts are as old as when they were read: take from the beat what passed since, and return it."""
        since_s = min(self._elapsed_s, max(0.0, (at if self._at is None else self._at) - at))
        if since_s <= 0:
            return 0.0, 0.0
        busy_since_s = self._busy_s * since_s / self._elapsed_s
        self._elapsed_s -= since_s
        self._busy_s -= busy_since_s
        return since_s, busy_since_s

    def _start_beat(self) -> None:
        self._elapsed_s = self._busy_s = self._decoding_s = self._stream_s = self._prompt_tokens = 0.0
        self._tokens_of_ended = 0

    def _learn(self) -> None:
        """What the last beats cost. Every stream has a token in every step: so many steps as tokens for each."""
        tokens = self._tokens_of_ended
        for flow in self._flows.values():
            for stream in flow.streams:
                tokens += stream.tokens - stream.learned
                stream.learned = stream.tokens
        steps = tokens * self._decoding_s / self._stream_s if self._stream_s else 0.0
        self.costs.add(self._elapsed_s, self._busy_s, steps, tokens, self._prompt_tokens)
        self._start_beat()

    def _decoding_now(self) -> int:
        own = sum([len(flow.streams) for flow in self._flows.values()])
        prefilling = sum([flow.prefilling for flow in self._flows.values()])
        return own + max(0, self._load.running + self._load.waiting - own - prefilling)


def _flow(policy: LanePolicy) -> _Flow:
    if policy.ttft_ms is None or policy.gap_ms is None:
        return _Flow()
    return _Live(policy.ttft_ms / 1000, policy.gap_ms / 1000)


def _clamp(value: float, least: int, most: int | None) -> int:
    whole = int(min(value, 1e12))
    return max(least, whole if most is None else min(whole, most))
