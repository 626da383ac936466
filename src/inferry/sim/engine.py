"""An engine that batches continuously, as a model: sequences in, happenings out, in steps of computed length.

The engine owns its sequences from `submit` to their end. Whoever drives it calls `advance` when `next_at` has come and
looks at `next_at` again after every call; the engine never looks at a clock. Each step decodes one token for every
sequence past its prompt, and spends what is left of the chunk on prompts: running ones first, then waiting ones, in the
order of the policy. As in vLLM, waiting sequences never displace running ones; running out of KV does, by recompute.

Steps in which nothing can change are taken together: a step is identical to the one before, but for the KV that grew.
"""

from heapq import heapify, heappop, heappush
from math import ceil, inf, sqrt

from msgspec import Struct

from inferry.sim.block_pool import BlockPool
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.lateness import LatenessSeries
from inferry.sim.server import Server


class Sequence:
    """One call inside the engine. `blocks` are the chained hashes of the prompt's full blocks.

    `late_s` is how far the stream fell behind a steady pace: max over tokens i of (time of token i - gap * i).
    """

    __slots__ = (
        "_anchor",
        "_arrival",
        "_decoding_since",
        "_earliest_step",
        "_hashed_blocks",
        "_held_blocks",
        "aborted",
        "blocks",
        "cached_tokens",
        "computed",
        "ended_at",
        "first_at",
        "itl_s",
        "key",
        "late_s",
        "output",
        "preemptions",
        "priority",
        "produced",
        "prompt",
        "tag",
        "target",
    )

    def __init__(
        self,
        key: str,
        prompt: int,
        output: int,
        *,
        priority: int = 0,
        blocks: tuple[int, ...] = (),
        itl_s: float | None = None,
        tag: object = None,
    ) -> None:
        if prompt < 1 or output < 1:
            raise ValueError("a sequence has at least one prompt token and one output token")
        self.key = key
        self.prompt = prompt
        self.output = output
        self.priority = priority
        self.blocks = blocks
        self.itl_s = itl_s
        self.tag = tag
        self.computed = 0
        self.produced = 0
        self.target = prompt
        self.cached_tokens = 0
        self.preemptions = 0
        self.aborted = False
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.late_s = -inf
        self._arrival = 0
        self._held_blocks = 0
        self._hashed_blocks: list[int] = []
        self._decoding_since: int | None = None
        self._anchor = 0
        self._earliest_step = 0


class FirstTokenEvent(Struct, frozen=True, gc=False):
    """The sequence wrote its first token; the client has it at `delivered_at`."""

    sequence: Sequence
    delivered_at: float


class FinishedEvent(Struct, frozen=True, gc=False):
    """The sequence is gone from the engine: complete, or aborted. The client knows at `delivered_at`."""

    sequence: Sequence
    delivered_at: float


EngineEvent = FirstTokenEvent | FinishedEvent


class Engine:
    """See the module. Times are seconds of virtual time."""

    def __init__(self, costs: CostModel, flags: EngineFlags, *, fast_forward: bool = True) -> None:
        self.costs = costs
        self.flags = flags
        self.pool = BlockPool(flags.blocks)
        self.server = Server()
        self.next_at: float | None = None
        self.busy_s = 0.0
        self.steps = 0
        self.computed_tokens = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self._fast_forward = fast_forward
        self._by_priority = flags.policy == "priority"
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._waiting_count = 0
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        # Decoding sequences by the step after which they are complete.
        self._completions: list[tuple[int, int, Sequence]] = []
        self._kv_read = 0
        # How many decoding sequences need a new block in steps of each residue.
        self._crossings = [0] * flags.block_tokens
        self._arrivals = 0
        self._lateness: dict[float, LatenessSeries] = {}
        # The work under way: steps begun at `_began_at`, and the prompt chunks in the first of them.
        self._began_at = 0.0
        self._steps_in_flight = 0
        self._chunks: list[tuple[Sequence, int]] = []
        self._aborting: list[Sequence] = []

    # What it shows.

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return self._waiting_count

    def output_tokens_at(self, sequence: Sequence, now: float) -> int:
        """Tokens the sequence has written so far, those of finished steps under way included."""
        since = sequence._decoding_since
        if since is None:
            return sequence.produced
        done = self.steps - since
        if self._steps_in_flight > 1 and self.next_at is not None:
            # Steps alike are taken together, and grow so little in length that they may count as equal here.
            elapsed_s = (now - self._began_at) / (self.next_at - self._began_at)
            done += min(self._steps_in_flight - 1, int(self._steps_in_flight * elapsed_s))
        return sequence.produced + done

    @property
    def kv_tokens(self) -> int:
        """KV held, in tokens of whole blocks."""
        return self.pool.held * self.flags.block_tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens computed in the step under way."""
        return (len(self._decoding) + sum([n for _, n in self._chunks])) if self._steps_in_flight else 0

    # What it is told.

    def receive(self, prompt_tokens: int, now: float) -> float:
        """The server process takes a turn with a request; when it is through with it. Then the next, or `submit`."""
        return self.server.accept(self.costs.request_cost_s(prompt_tokens) / self.costs.request_turns, now)

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence. It can enter with the next step."""
        if sequence.prompt + sequence.output > self.flags.blocks * self.flags.block_tokens:
            raise ValueError(f"{sequence.key} can never fit the KV cache")
        self._arrivals += 1
        sequence._arrival = self._arrivals
        was_blocked = self._waiting_count > 0
        self._enqueue(sequence)
        if not self._steps_in_flight:
            # Not at once: what is submitted at the same instant enters the same step.
            self.next_at = now
        elif (
            self._steps_in_flight > 1
            and self.running < self.flags.max_num_seqs
            and self._is_next(sequence, was_blocked)
        ):
            self._truncate_steps(now)
        # The step after the one that runs is put together already, where the engine works ahead.
        sequence._earliest_step = (
            self.steps + self._steps_in_flight + 1 if self._steps_in_flight and self.flags.works_ahead else 0
        )

    def abort(self, sequence: Sequence, now: float) -> bool:
        """Stop a sequence. True: it is gone at once, unheard. False: a Finished says, or has said, that it is gone."""
        if sequence.ended_at is not None or sequence.aborted:
            return False
        sequence.aborted = True
        if sequence not in self._decoding and sequence not in self._prefilling:
            sequence.ended_at = now
            self._waiting_count -= 1
            if self._steps_in_flight > 1 and self.running < self.flags.max_num_seqs:
                self._truncate_steps(now)  # it may have been the one that the others waited behind
            return True
        self._aborting.append(sequence)
        if self._steps_in_flight > 1:
            self._truncate_steps(now)
        return False

    def clear(self, now: float) -> list[Sequence]:
        """The engine dies: everything in it is lost, its cache too. What was lost is returned, oldest first."""
        lost = [*self._decoding, *self._prefilling, *[s for *_, s in self._waiting if not s.aborted]]
        lost.sort(key=lambda sequence: sequence._arrival)
        for sequence in lost:
            sequence.aborted = True
            sequence.ended_at = now
        self.pool = BlockPool(self.flags.blocks)
        self._waiting, self._completions, self._aborting, self._chunks = [], [], [], []
        self._prefilling, self._decoding = {}, {}
        self._waiting_count = self._kv_read = self._steps_in_flight = 0
        self._crossings = [0] * self.flags.block_tokens
        self.next_at = None
        return lost

    def advance(self, now: float) -> list[EngineEvent]:
        """`next_at` has come: end the steps under way and begin the next. What happened, in order."""
        events = self._end_steps(now) if self._steps_in_flight else []
        self._trim_lateness()
        self._begin_steps(now)
        return events

    # Ending steps.

    def _end_steps(self, now: float) -> list[EngineEvent]:
        count, self._steps_in_flight = self._steps_in_flight, 0
        self.busy_s += now - self._began_at
        decoding = len(self._decoding)
        if decoding:
            self.pool.take(self._crossings_in(count))
        if count > 1 and self._lateness:
            # Inside identical steps lateness is convex, so that its maximum is at one of the ends.
            first_end = self._began_at + self._duration_s(1)
            delivered = first_end + self._delivery_s(first_end)
            for series in self._lateness.values():
                series.add(self.steps + 1, delivered)
        delivered = now + self._delivery_s(now)
        for series in self._lateness.values():
            series.add(self.steps + count, delivered)
        self.steps += count
        self._kv_read += count * decoding
        self.computed_tokens += decoding * count
        self.output_tokens += decoding * count
        events: list[EngineEvent] = []
        chunks, self._chunks = self._chunks, []
        for sequence, tokens in chunks:
            sequence.computed += tokens
            self.computed_tokens += tokens
            self.prompt_tokens += tokens
            if sequence.computed == sequence.target:
                self._start_decoding(sequence, now, delivered, events)
        completions = self._completions
        while completions and completions[0][0] <= self.steps:
            sequence = heappop(completions)[2]
            if sequence in self._decoding and sequence._decoding_since is not None:
                self._remove(sequence)
                sequence.ended_at = now
                events.append(FinishedEvent(sequence, delivered))
        if self._aborting:
            for sequence in self._aborting:
                if sequence.ended_at is None:
                    self._remove(sequence)
                    sequence.ended_at = now
                    events.append(FinishedEvent(sequence, delivered))
            self._aborting = []
        return events

    def _delivery_s(self, now: float) -> float:
        """From the end of a step until its tokens are with their clients: the server passes on one after the other."""
        return self.server.delay_s(now) + self._step_delivery_s() / 2 + self.costs.reply_s

    def _step_delivery_s(self) -> float:
        """What the server has to do for the tokens of one of the steps under way."""
        context = self._kv_read + sum([sequence.target for sequence, _ in self._chunks])
        return self.costs.delivery_s(len(self._decoding) + len(self._chunks), context)

    def _start_decoding(self, sequence: Sequence, now: float, delivered: float, events: list[EngineEvent]) -> None:
        """Its last prompt token is computed, which gave one token of output."""
        del self._prefilling[sequence]
        if sequence.itl_s is not None and sequence.itl_s not in self._lateness:
            series = self._lateness[sequence.itl_s] = LatenessSeries(sequence.itl_s)
            series.add(self.steps, delivered)
        self._decoding[sequence] = None
        self._kv_read += sequence.computed
        sequence._decoding_since = self.steps
        sequence._anchor = self.steps - sequence.produced
        sequence.produced += 1
        self.output_tokens += 1
        self._crossings[(sequence.computed - self.steps) % self.flags.block_tokens] += 1
        if sequence.first_at is None:
            sequence.first_at = now
            events.append(FirstTokenEvent(sequence, delivered))
        done_after = self.steps + sequence.output - sequence.produced
        heappush(self._completions, (done_after, sequence._arrival, sequence))

    def _remove(self, sequence: Sequence) -> None:
        """Give back all it holds; count what it wrote."""
        since = sequence._decoding_since
        if since is not None:
            output_tokens_at = self.steps - since
            sequence.produced += output_tokens_at
            self._crossings[(sequence.computed - since) % self.flags.block_tokens] -= 1
            sequence.computed += output_tokens_at
            self._kv_read -= sequence.computed
            if sequence.itl_s is not None:
                worst = self._lateness[sequence.itl_s].worst_since(since, sequence._anchor)
                sequence.late_s = max(sequence.late_s, worst)
            sequence._decoding_since = None
            sequence._held_blocks = ceil(sequence.computed / self.flags.block_tokens)
            del self._decoding[sequence]
        else:
            self._prefilling.pop(sequence, None)
        self.pool.release(sequence._hashed_blocks, sequence._held_blocks - len(sequence._hashed_blocks))
        sequence._held_blocks = 0
        sequence._hashed_blocks = []

    # Beginning steps.

    def _begin_steps(self, now: float) -> None:
        flags, pool, block = self.flags, self.pool, self.flags.block_tokens
        preempted = False
        while self._crossings[-self.steps % block] > pool.available:
            self._preempt()
            preempted = True
        budget = flags.max_num_batched_tokens - len(self._decoding)
        reserved = self._crossings[-self.steps % block]
        chunks: list[tuple[Sequence, int]] = []
        pairs = 0.0
        for sequence in tuple(self._prefilling):
            if budget <= 0:
                break
            if sequence not in self._prefilling:
                continue  # displaced by one before it
            tokens = min(budget, sequence.target - sequence.computed)
            while self._new_blocks(sequence, tokens) + reserved > pool.available and sequence in self._prefilling:
                self._preempt()
                preempted = True
                reserved = self._crossings[-self.steps % block]
            if sequence in self._prefilling:
                pairs += self._compute(sequence, tokens, chunks)
                budget -= tokens
        if preempted:
            chunks = [(sequence, tokens) for sequence, tokens in chunks if sequence in self._prefilling]
        else:
            deferred = self._defer_late_arrivals() if flags.works_ahead and (chunks or self._decoding) else []
            while budget > 0 and self.running < flags.max_num_seqs and (head := self._head()) is not None:
                hit = min(pool.hits(head.blocks), (head.target - 1) // block) if flags.prefix_caching else 0
                tokens = min(budget, head.target - hit * block)
                wanted = ceil((hit * block + tokens) / block) - hit
                if wanted + pool.idle_among(head.blocks, hit) + reserved > pool.available:
                    break
                heappop(self._waiting)
                self._waiting_count -= 1
                self._admit(head, hit)
                pairs += self._compute(head, tokens, chunks)
                budget -= tokens
            for entry in deferred:
                heappush(self._waiting, entry)
        self._chunks = chunks
        if not chunks and not self._decoding:
            if preempted:
                self._begin_steps(now)
            else:
                self.next_at = None
                self.server.set_inflow(0.0, now)
            return
        self._began_at = now
        self._steps_in_flight = 1
        if chunks:
            decode = self.costs.decode_s(len(self._decoding), self._kv_read)
            prompt_tokens = sum([n for _, n in chunks])
            self.next_at = now + decode + self.costs.prefill_s(prompt_tokens, pairs)
            self._set_server_inflow(self._step_delivery_s(), now)
            return
        # Whoever was too early for this step is looked at again after it.
        if self._fast_forward and not preempted and not (flags.works_ahead and self._waiting_count):
            self._steps_in_flight = self._identical_steps()
        self.next_at = now + self._duration_s(self._steps_in_flight)
        self._set_server_inflow(self._step_delivery_s() * self._steps_in_flight, now)

    def _set_server_inflow(self, work_s: float, now: float) -> None:
        """The steps that begin now bring so much work to the server until they end."""
        if work_s and self.next_at is not None and self.next_at > now:
            self.server.set_inflow(work_s / (self.next_at - now), now)

    def _admit(self, sequence: Sequence, hit: int) -> None:
        self._prefilling[sequence] = None
        self.pool.queried_tokens += sequence.target
        self.pool.hit_tokens += hit * self.flags.block_tokens
        if hit:
            self.pool.share(sequence.blocks, hit)
            sequence._hashed_blocks = list(sequence.blocks[:hit])
            sequence._held_blocks = hit
        sequence.computed = hit * self.flags.block_tokens
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed

    def _compute(self, sequence: Sequence, tokens: int, chunks: list[tuple[Sequence, int]]) -> float:
        """Put a chunk of its prompt into the step; the pairs attention looks at."""
        block = self.flags.block_tokens
        before, after = sequence.computed, sequence.computed + tokens
        new = self._new_blocks(sequence, tokens)
        self.pool.take(new)
        sequence._held_blocks += new
        if self.flags.prefix_caching:
            hashed_blocks = self.pool.publish(sequence.blocks, before // block, after // block)
            sequence._hashed_blocks += hashed_blocks
        chunks.append((sequence, tokens))
        return tokens * (before + after) / 2

    def _new_blocks(self, sequence: Sequence, tokens: int) -> int:
        block = self.flags.block_tokens
        return ceil((sequence.computed + tokens) / block) - ceil(sequence.computed / block)

    def _crossings_in(self, steps: int) -> int:
        """Blocks that decoding sequences need in the next steps."""
        crossings, block, start = self._crossings, self.flags.block_tokens, -self.steps
        rounds, rest = divmod(steps, block)
        part = sum([crossings[(start - i) % block] for i in range(rest)])
        return rounds * len(self._decoding) + part

    def _identical_steps(self) -> int:
        """How many steps can be taken before a sequence is complete or KV runs out."""
        completions = self._completions
        while completions[0][2]._decoding_since is None or completions[0][2].ended_at is not None:
            heappop(completions)
        most = completions[0][0] - self.steps
        available = self.pool.available
        while most > 1 and self._crossings_in(most) > available:
            most -= 1
        return most

    def _duration_s(self, steps: int) -> float:
        """How long that many decode steps take from the beginning of those under way."""
        count = len(self._decoding)
        one = self.costs.decode_s(count, self._kv_read)
        return steps * one + self.costs.kv_token_s * count * (steps * (steps - 1) / 2)

    def _truncate_steps(self, now: float) -> None:
        """Something changed: the step that runs now is the last of those under way."""
        count = len(self._decoding)
        slope = self.costs.kv_token_s * count / 2
        one = self.costs.decode_s(count, self._kv_read)
        elapsed_s = now - self._began_at
        # steps * (one - slope) + steps² * slope = gone
        linear = one - slope
        guess = (
            elapsed_s / linear if slope <= 0 else (sqrt(linear * linear + 4 * slope * elapsed_s) - linear) / (2 * slope)
        )
        steps = max(1, int(guess))
        while steps > 1 and self._duration_s(steps - 1) >= elapsed_s:
            steps -= 1
        while steps < self._steps_in_flight and self._duration_s(steps) < elapsed_s:
            steps += 1
        if steps < self._steps_in_flight:
            self._steps_in_flight = steps
            self.next_at = self._began_at + self._duration_s(steps)

    # The waiting queue and preemption.

    def _is_next(self, sequence: Sequence, others_wait: bool) -> bool:
        """Whether a sequence that was just queued is the next to be admitted."""
        return not others_wait or (self._by_priority and self._head() is sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        priority = sequence.priority if self._by_priority else 0
        heappush(self._waiting, (priority, sequence._arrival, sequence))
        self._waiting_count += 1

    def _defer_late_arrivals(self) -> list[tuple[int, int, Sequence]]:
        """Those who came after the step that begins now was put together."""
        deferred = [entry for entry in self._waiting if entry[2]._earliest_step > self.steps]
        if deferred:
            self._waiting = [entry for entry in self._waiting if entry[2]._earliest_step <= self.steps]
            heapify(self._waiting)
        return deferred

    def _head(self) -> Sequence | None:
        waiting = self._waiting
        while waiting:
            if not waiting[0][2].aborted:
                return waiting[0][2]
            heappop(waiting)
        return None

    def _preempt(self) -> None:
        """Out of KV: the last in order gives up all it holds and computes it again later, its own output included."""
        by_priority = self._by_priority
        victim = max(
            (*self._decoding, *self._prefilling),
            key=lambda sequence: (sequence.priority if by_priority else 0, sequence._arrival),
        )
        was_decoding = victim._decoding_since is not None
        self._remove(victim)
        if was_decoding:
            self._completions = [entry for entry in self._completions if entry[2] is not victim]
            heapify(self._completions)
        self.preemptions += 1
        victim.preemptions += 1
        victim.computed = 0
        victim.target = victim.prompt + victim.produced
        self._enqueue(victim)

    def _trim_lateness(self) -> None:
        """Nobody will ask about steps before the oldest sequence that decodes now began to."""
        for series in self._lateness.values():
            if series.needs_trim:
                began = [since for one in self._decoding if (since := one._decoding_since) is not None]
                series.forget_before(min(began, default=self.steps))
