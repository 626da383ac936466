"""How much of a worker the gateway may use now: a `Capacity`, from measured step costs and the lanes' SLO targets.

One controller per worker. Its owner reports what the gateway sees (jobs sent, first tokens, tokens, ends) and asks for
a `Capacity`. Time is an argument, and the same inputs give the same answers.

Token i of a stream is due `ttft + i * itl` after the job's arrival; its slack is the time until its next token is due.
Prefill beside the stream reduces slack, idle moments restore it. The least slack of all live streams determines the
inter-token latency that the next second may have, and so, with the measured costs, the rate of prompt tokens. The loop
is closed: slack that a wrong estimate cost lowers the next rate.

Batch work may use what leaves every live stream `SLACK_ITLS` intervals of slack. Paced live prompts may use more the
longer they wait, down to `MIN_SLACK_ITLS`.
"""

from collections.abc import Mapping, Sequence
from math import exp, inf
from typing import Final

from inferry.domain.jobs import Footprint
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.workers import Capacity, DirectWaits, EngineCounts, Load
from inferry.scheduling.capacity.direct_engine import DirectEngine
from inferry.scheduling.capacity.step_costs import MEMORY_S, StepCostModel

IDLE_AFTER_S = 1.0
"""A lane with nothing in flight for this many seconds is idle. Agents pause less between two steps."""
PREFILL_TTFT_FRACTION = 0.5
"""Part of the TTFT target that prefill ahead of a prompt may use; the rest is for waiting and for wrong estimates."""
SLACK_SPEND_S = 1.0
SLACK_RECOVERY_S = 0.4
"""Seconds in which slack above the kept amount is spent, and in which slack below it is earned back. Recovery is
faster, because one long step can miss a target and costs are estimates."""
SLACK_ITLS = 14
"""Slack, in inter-token intervals, that live streams keep from batch work."""
MIN_SLACK_ITLS = 5
"""Slack that live streams always keep: steps vary in length, and a prompt that was sent cannot be recalled."""
DECODE_FRACTION = 0.5
"""Part of the inter-token latency that decoding may use before batch jobs are held; the rest is for prompts."""
MIN_PREFILL_FRACTION = 0.15
"""Part of engine time that paced prompts get where the ITL target cannot be met at any rate."""
COUNTS_VALID_S = 3.0
"""Seconds after which engine counters are stale, and costs are learned from the observed output."""
RATIO_PRIOR_TOKENS = 5000
"""Prompt tokens at a ratio of one that are added to both counts when the gateway's is compared with the engine's."""
INITIAL_PREFILL_TOKENS = 4096
"""Bound on prefill tokens in flight before costs are known."""
OUTPUT_WEIGHT: Final = 0.05
"""Weight of the latest job in the mean output tokens, predicted and real."""
ATTAINMENT_WEIGHT: Final = 0.05
"""Weight of the latest ended stream in the share of streams that met their target."""
HOLDING_PAYS: Final = 0.9
"""Where more streams than this meet their target, holding jobs back is what it is for, and is not bounded."""
KV_FRACTION = 0.95
"""Part of the KV capacity that is used: output lengths are estimates."""


class Stream:
    """A job that decodes. The owner of the controller counts `tokens` up as they come."""

    __slots__ = ("arrived_at", "is_late", "learned_tokens", "tokens")

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.is_late = False
        self.tokens = 1
        self.learned_tokens = 1


class _LaneActivity:
    """What one lane has on the worker."""

    __slots__ = ("last_busy_at", "prefilling", "slack_s", "streams", "waiting_since")

    def __init__(self, former: "_LaneActivity | None" = None) -> None:
        self.waiting_since: float | None = None if former is None else former.waiting_since
        self.prefilling: int = 0 if former is None else former.prefilling
        self.streams: dict[Stream, None] = {} if former is None else former.streams
        self.last_busy_at: float = -inf if former is None else former.last_busy_at
        self.slack_s = inf

    def is_idle(self, now: float) -> bool:
        if self.prefilling or self.streams or self.waiting_since is not None:
            return False
        return now - self.last_busy_at >= IDLE_AFTER_S


class _SloLaneActivity(_LaneActivity):
    """A lane with SLO targets."""

    __slots__ = ("itl_s", "ttft_s")

    def __init__(self, ttft_s: float, itl_s: float, former: _LaneActivity | None) -> None:
        super().__init__(former)
        self.ttft_s = ttft_s
        self.itl_s = itl_s

    def update_slack(self, now: float) -> None:
        """Note the least slack of the streams that can still meet their target."""
        from_arrival, itl_s = self.ttft_s - now, self.itl_s
        least = inf
        for stream in self.streams:
            slack = stream.arrived_at + from_arrival + itl_s * stream.tokens
            if 0.0 <= slack < least:
                least = slack
        self.slack_s = least

    def missed(self, stream: Stream, now: float) -> bool:
        """Whether the latest token of the stream comes after it was due."""
        return now > stream.arrived_at + self.ttft_s + self.itl_s * (stream.tokens - 1)

    def ttft_left_fraction(self, now: float) -> float:
        """Part of its TTFT target that the longest-waiting job has left. A job that has missed it is not urgent."""
        waited = 0.0 if self.waiting_since is None else (now - self.waiting_since) / self.ttft_s
        return 1.0 - waited if waited < 1.0 else 1.0

    def target_itl_s(self, keep_itls: float) -> float:
        """Inter-token latency of the next moment that moves slack towards `keep_itls` intervals."""
        if self.slack_s == inf:
            return inf if self.streams else self.itl_s
        spare_s = self.slack_s - keep_itls * self.itl_s
        if spare_s > 0:
            return self.itl_s * (1.0 + spare_s / SLACK_SPEND_S)
        return self.itl_s / (1.0 - spare_s / SLACK_RECOVERY_S)


class CapacityController:
    """`limits` are what the worker can hold; `chunk_tokens` is what it computes in one step."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy], limits: Capacity, chunk_tokens: int | None = None) -> None:
        self._activities: dict[Lane, _LaneActivity] = {}
        self.use_lanes(lanes)
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
        self._direct = DirectEngine(len(Lane), self.costs)
        self._direct.limit(limits.sequences, limits.kv_tokens, chunk_tokens)
        self._expected_output = self._ended_output = 0.0
        self._attainment = 1.0

    # -- what it is told -----------------------------------------------------------------------------------------------

    def use_lanes(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        """Follow other SLO targets. What is in flight stays counted."""
        self._activities = {lane: _activity_for(lanes[lane], self._activities.get(lane)) for lane in sorted(lanes)}
        self._slo_lanes = [activity for activity in self._activities.values() if isinstance(activity, _SloLaneActivity)]

    def arrived(self, lane: Lane, footprint: Footprint, now: float) -> None:
        """A job arrived that the engine alone would get now."""
        output_tokens = footprint.output.expected
        if output_tokens:  # a pooled job has none
            self._expected_output = _smoothed(self._expected_output, output_tokens)
            if self._ended_output:  # predicted lengths are corrected by what ended
                output_tokens = max(1, int(output_tokens * self._ended_output / self._expected_output))
        tokens = footprint.prefill_tokens / self._token_ratio()
        self._direct.arrived(lane, tokens, footprint.prompt.expected, output_tokens, now)

    def sent(self, lane: Lane, prefill_tokens: int, now: float) -> None:
        """A job was sent to the worker, with this many prompt tokens to compute in the gateway's count."""
        self._advance(now)
        self._activities[lane].prefilling += 1
        weight = 0.1 if self._typical_prompt_tokens else 1.0
        self._typical_prompt_tokens += weight * (prefill_tokens - self._typical_prompt_tokens)

    def first_token(self, lane: Lane, prefill_tokens: int, arrived_at: float, now: float) -> Stream:
        """The job's prompt is computed; `prefill_tokens` may be known better than at `sent`."""
        self._advance(now)
        activity = self._activities[lane]
        activity.prefilling -= 1
        self._prompt_tokens += prefill_tokens
        stream = Stream(arrived_at)
        stream.is_late = isinstance(activity, _SloLaneActivity) and activity.missed(stream, now)
        activity.streams[stream] = None
        return stream

    def ended(self, lane: Lane, stream: Stream | None, now: float) -> None:
        """A job that was sent has ended; `stream` is None if it had no first token."""
        self._advance(now)
        activity = self._activities[lane]
        if stream is None:
            activity.prefilling -= 1
        else:
            del activity.streams[stream]
            self._ended_output = _smoothed(self._ended_output, stream.tokens)
            self._ended_tokens += stream.tokens - stream.learned_tokens
            if isinstance(activity, _SloLaneActivity):
                attained = not stream.is_late and not activity.missed(stream, now)
                self._attainment += ATTAINMENT_WEIGHT * (attained - self._attainment)

    def waiting(self, lane: Lane, since: float | None) -> None:
        """Arrival time of the job that has waited longest in the lane, for any worker; None if no job waits."""
        self._activities[lane].waiting_since = since

    def observe(self, load: Load) -> None:
        """The load that the worker reports."""
        self._load = load

    def observe_counts(self, counts: EngineCounts, now: float) -> None:
        """Counters of the engine, as read at `now`.

        They are more exact than what is observed from outside: servers join tokens into one event, and the cached part
        of a prompt is an estimate.
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
        """The limits of the worker have changed."""
        self._limits = limits
        self._chunk_tokens = chunk_tokens
        self._direct.limit(limits.sequences, limits.kv_tokens, chunk_tokens)

    # -- what it answers -----------------------------------------------------------------------------------------------

    def capacity(self, now: float) -> Capacity:
        self._advance(now)
        if self._elapsed_s > 0 and now - self._counted_at > COUNTS_VALID_S:
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
            self._direct_waits(now),
        )

    def slack_s(self, lane: Lane) -> float:
        """Least slack of the lane's streams when capacity was last computed; infinite without streams."""
        return self._activities[lane].slack_s

    def _prefill_tokens_per_s(self, active: Sequence[_SloLaneActivity], step_s: float, now: float) -> float | None:
        """The rate r of R prompt tokens per second that stretches a step of d seconds to g = d / (1 - r / R)."""
        limit = self._limits.prefill_tokens_per_s
        itl_s = inf
        keep_itls = float(SLACK_ITLS)
        best = next((activity for activity in active if activity.streams), None)
        for activity in reversed(active):
            if activity is not best:  # prompts of the best lane are not paced
                keep_itls = min(keep_itls, max(MIN_SLACK_ITLS, SLACK_ITLS * activity.ttft_left_fraction(now)))
            itl_s = min(itl_s, activity.target_itl_s(keep_itls))
        if itl_s == inf:
            return limit
        fraction = max(MIN_PREFILL_FRACTION, 1 - step_s / itl_s)
        rate = self.costs.prompt_tokens_per_s * fraction * self._token_ratio()
        return rate if limit is None else min(rate, limit)

    def _prefill_tokens(self, active: Sequence[_SloLaneActivity], step_s: float) -> int | None:
        """The prompt tokens that clear before a prompt that arrives now, in their part of its TTFT target."""
        limit = self._limits.prefill_tokens
        if not self._slo_lanes:
            return limit
        token_s = self.costs.prompt_s + (step_s / self._chunk_tokens if self._chunk_tokens else 0.0)
        ttft_s = min(activity.ttft_s for activity in active or self._slo_lanes)
        slack_s = ttft_s - self._typical_prompt_tokens / self._token_ratio() * token_s - step_s
        return self._clamp_prefill(PREFILL_TTFT_FRACTION * slack_s / token_s * self._token_ratio(), limit)

    def _direct_waits(self, now: float) -> DirectWaits | None:
        """What the engine alone would do. Without SLO targets no job is held back for another."""
        if not self._slo_lanes or self._chunk_tokens is None:
            return None
        if all(activity.is_idle(now) for activity in self._activities.values()):
            self._direct.clear()
        self._direct.advance(now)
        if self._attainment >= HOLDING_PAYS:
            return None
        waits_s = tuple([self._direct.wait_s(lane, now) for lane in range(len(Lane))])
        token_s = self._direct.token_s()
        return DirectWaits(waits_s, token_s / self._token_ratio(), self._chunk_tokens, token_s)

    def _token_ratio(self) -> float:
        """Prompt tokens in the gateway's count for each one that the engine computes.

        The cached part of a prompt is an estimate, and capacity is spent in estimated tokens.
        """
        return (self._estimated_tokens + RATIO_PRIOR_TOKENS) / (self._counted_tokens + RATIO_PRIOR_TOKENS)

    def _batch_sequences(self, active: Sequence[_SloLaneActivity]) -> int | None:
        """The sequences that decode within their part of the target ITL, or within all of it while live lanes are idle.

        At least as many as make a step twice as long as an empty one: where that misses the target, fewer would not
        meet it either.
        """
        limit, costs = self._limits.sequences, self.costs
        if not self._slo_lanes or costs.token_s <= 0:
            return limit
        if active:
            step_s = DECODE_FRACTION * min(activity.target_itl_s(SLACK_ITLS) for activity in active)
        else:
            step_s = min(activity.itl_s for activity in self._slo_lanes)
        step_s = max(step_s, 2 * costs.base_s)
        return _clamp((step_s - costs.base_s) / costs.token_s, 1, limit)

    def _clamp_prefill(self, tokens: float, limit: int | None) -> int:
        """At least a typical job, so that the bound never stops all prefill."""
        return _clamp(max(tokens, self._typical_prompt_tokens), 1, limit)

    # -- what it observes ----------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Account for the time until now, with what was in flight."""
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
        """End the interval when counters were read, and return the elapsed and busy seconds since."""
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
        """Learn from the observed output: every stream has one token in every step."""
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


def _activity_for(policy: LanePolicy, former: _LaneActivity | None) -> _LaneActivity:
    if policy.ttft_ms is None or policy.itl_ms is None:
        return _LaneActivity(former)
    return _SloLaneActivity(policy.ttft_ms / 1000, policy.itl_ms / 1000, former)


def _smoothed(mean: float, value: float) -> float:
    return mean + OUTPUT_WEIGHT * (value - mean) if mean else value


def _clamp(value: float, least: int, maximum: int | None) -> int:
    rounded = int(min(value, 1e12))
    return max(least, rounded if maximum is None else min(rounded, maximum))
