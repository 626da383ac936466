"""A model of an engine with continuous batching: sequences in, events out, in steps of computed duration.

The engine owns its sequences from `submit` to their end. Its driver calls `advance` at `next_at` and reads `next_at`
again after every call; the engine never reads a clock. Each step decodes one token for every sequence past its prompt
and spends the rest of the token budget on prompts: running ones first, then waiting ones in the order of the policy. As
in vLLM, a waiting sequence never displaces a running one; a lack of KV blocks does, by recompute.

Consecutive steps in which nothing can change are taken together: each equals the one before, except for the KV read.
"""

from heapq import heapify, heappop, heappush
from math import ceil

from inferry.sim.block_pool import BlockDemand, BlockPool
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.lateness import LatenessTracker
from inferry.sim.sequence import EngineEvent, EngineSequence, FinishedEvent, FirstTokenEvent
from inferry.sim.server import Server
from inferry.sim.waiting_queue import WaitingQueue


class _Step:
    """A step that is being put together. `pairs` are the query-key pairs that attention over its prompts reads."""

    __slots__ = ("budget", "chunks", "pairs", "preempted")

    def __init__(self) -> None:
        self.budget = 0
        self.chunks: list[tuple[EngineSequence, int]] = []
        self.pairs = 0.0
        self.preempted = False


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
        self._waiting = WaitingQueue(by_priority=flags.policy == "priority")
        self._prefilling: dict[EngineSequence, None] = {}
        self._decoding: dict[EngineSequence, None] = {}
        # Decoding sequences by the step after which they are complete.
        self._completions: list[tuple[int, int, EngineSequence]] = []
        self._kv_read = 0
        self._demand = BlockDemand(flags.block_tokens)
        self._arrivals = 0
        self._lateness = LatenessTracker()
        # The steps in flight began at `_began_at`; the prompt chunks are in the first of them.
        self._began_at = 0.0
        self._steps_in_flight = 0
        self._chunks: list[tuple[EngineSequence, int]] = []
        self._aborting: list[EngineSequence] = []

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return self._waiting.count

    def output_tokens_at(self, sequence: EngineSequence, now: float) -> int:
        """Tokens that the sequence has produced so far, including those of the finished steps in flight."""
        since = sequence.decoding_since
        if since is None:
            return sequence.produced
        done = self.steps - since
        if self._steps_in_flight > 1 and self.next_at is not None:
            # Steps that are taken together differ so little in duration that they count as equal here.
            elapsed_s = (now - self._began_at) / (self.next_at - self._began_at)
            done += min(self._steps_in_flight - 1, int(self._steps_in_flight * elapsed_s))
        return sequence.produced + done

    @property
    def kv_tokens(self) -> int:
        """KV held, in tokens of whole blocks."""
        return self.pool.held * self.flags.block_tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens computed in the step in flight."""
        return (len(self._decoding) + sum([n for _, n in self._chunks])) if self._steps_in_flight else 0

    # -- input ---------------------------------------------------------------------------------------------------------

    def receive(self, prompt_tokens: int, now: float) -> float:
        """The server process takes one turn with a request; when that turn ends. Another turn or `submit` follows."""
        return self.server.accept(self.costs.request_cost_s(prompt_tokens) / self.costs.request_turns, now)

    def submit(self, sequence: EngineSequence, now: float) -> None:
        """Queue a sequence. It can be admitted with the next step."""
        if sequence.prompt + sequence.output > self.flags.blocks * self.flags.block_tokens:
            raise ValueError(f"sequence {sequence.key} needs more KV than the cache has")
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._waiting.push(sequence)
        if not self._steps_in_flight:
            # Not at once: sequences submitted at the same instant enter the same step.
            self.next_at = now
        elif self._steps_in_flight > 1 and self.running < self.flags.max_num_seqs and self._waiting.is_next(sequence):
            self._truncate_steps(now)
        # An engine that works ahead has already put together the step after the current one.
        sequence.earliest_step = (
            self.steps + self._steps_in_flight + 1 if self._steps_in_flight and self.flags.works_ahead else 0
        )

    def abort(self, sequence: EngineSequence, now: float) -> bool:
        """Stop a sequence. True: it was waiting and is gone. False: a FinishedEvent follows, or has been returned."""
        if sequence.ended_at is not None or sequence.aborted:
            return False
        sequence.aborted = True
        if sequence not in self._decoding and sequence not in self._prefilling:
            sequence.ended_at = now
            self._waiting.count -= 1
            if self._steps_in_flight > 1 and self.running < self.flags.max_num_seqs:
                self._truncate_steps(now)  # it may have blocked the sequences behind it
            return True
        self._aborting.append(sequence)
        if self._steps_in_flight > 1:
            self._truncate_steps(now)
        return False

    def clear(self, now: float) -> list[EngineSequence]:
        """The engine dies and loses all sequences and its cache. The lost sequences, oldest first."""
        lost = [*self._decoding, *self._prefilling, *self._waiting.clear()]
        lost.sort(key=lambda sequence: sequence.arrival)
        for sequence in lost:
            sequence.aborted = True
            sequence.ended_at = now
        self.pool = BlockPool(self.flags.blocks)
        self._completions, self._aborting, self._chunks = [], [], []
        self._prefilling, self._decoding = {}, {}
        self._kv_read = self._steps_in_flight = 0
        self._demand = BlockDemand(self.flags.block_tokens)
        self.next_at = None
        return lost

    def advance(self, now: float) -> list[EngineEvent]:
        """At `next_at`: end the steps in flight and begin the next ones. The events, in order."""
        events = self._end_steps(now) if self._steps_in_flight else []
        if self._lateness.needs_trim:
            # Steps before the oldest decoding sequence began are never asked for again.
            began = [since for one in self._decoding if (since := one.decoding_since) is not None]
            self._lateness.forget_before(min(began, default=self.steps))
        self._begin_steps(now)
        return events

    # -- the end of steps ----------------------------------------------------------------------------------------------

    def _end_steps(self, now: float) -> list[EngineEvent]:
        count, self._steps_in_flight = self._steps_in_flight, 0
        self.busy_s += now - self._began_at
        decoding = len(self._decoding)
        if decoding:
            self.pool.take(self._demand.in_steps(self.steps, count))
        delivered = self._record_lateness(count, now)
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
            if sequence in self._decoding and sequence.decoding_since is not None:
                self._finish(sequence, now, delivered, events)
        aborting, self._aborting = self._aborting, []
        for sequence in aborting:
            if sequence.ended_at is None:
                self._finish(sequence, now, delivered, events)
        return events

    def _record_lateness(self, count: int, now: float) -> float:
        """Add the ends of the steps in flight to every series; when the last one's tokens are delivered."""
        if count > 1 and self._lateness.is_used:
            # Within identical steps lateness is convex: its maximum is at one of the ends.
            first_end = self._began_at + self._duration_s(1)
            delivered = first_end + self._delivery_s(first_end)
            self._lateness.add(self.steps + 1, delivered)
        delivered = now + self._delivery_s(now)
        self._lateness.add(self.steps + count, delivered)
        return delivered

    def _finish(self, sequence: EngineSequence, now: float, delivered: float, events: list[EngineEvent]) -> None:
        self._remove(sequence)
        sequence.ended_at = now
        events.append(FinishedEvent(sequence, delivered))

    def _delivery_s(self, now: float) -> float:
        """From the end of a step until clients have its tokens: the server process sends one after the other."""
        return self.server.delay_s(now) + self._step_delivery_s() / 2 + self.costs.reply_s

    def _step_delivery_s(self) -> float:
        """Work of the server process for the tokens of one of the steps in flight."""
        context = self._kv_read + sum([sequence.target for sequence, _ in self._chunks])
        return self.costs.delivery_s(len(self._decoding) + len(self._chunks), context)

    def _start_decoding(
        self, sequence: EngineSequence, now: float, delivered: float, events: list[EngineEvent]
    ) -> None:
        """The last prompt token is computed, which produced the first output token."""
        del self._prefilling[sequence]
        if sequence.itl_s is not None:
            self._lateness.start(sequence.itl_s, self.steps, delivered)
        self._decoding[sequence] = None
        self._kv_read += sequence.computed
        sequence.decoding_since = self.steps
        sequence.anchor_step = self.steps - sequence.produced
        sequence.produced += 1
        self.output_tokens += 1
        self._demand.add(sequence.computed, self.steps)
        if sequence.first_at is None:
            sequence.first_at = now
            events.append(FirstTokenEvent(sequence, delivered))
        done_after = self.steps + sequence.output - sequence.produced
        heappush(self._completions, (done_after, sequence.arrival, sequence))

    def _remove(self, sequence: EngineSequence) -> None:
        """Release all that the sequence holds; count its output."""
        since = sequence.decoding_since
        if since is not None:
            decoded = self.steps - since
            sequence.produced += decoded
            self._demand.remove(sequence.computed, since)
            sequence.computed += decoded
            self._kv_read -= sequence.computed
            if sequence.itl_s is not None:
                worst = self._lateness.worst_since(sequence.itl_s, since, sequence.anchor_step)
                sequence.late_s = max(sequence.late_s, worst)
            sequence.decoding_since = None
            sequence.held_blocks = ceil(sequence.computed / self.flags.block_tokens)
            del self._decoding[sequence]
        else:
            self._prefilling.pop(sequence, None)
        self.pool.release(sequence.hashed_blocks, sequence.held_blocks - len(sequence.hashed_blocks))
        sequence.held_blocks = 0
        sequence.hashed_blocks = []

    # -- the beginning of steps ----------------------------------------------------------------------------------------

    def _begin_steps(self, now: float) -> None:
        step = self._plan_step()
        while not step.chunks and not self._decoding:
            if not step.preempted:
                self._chunks = []
                self.next_at = None
                self.server.set_inflow(0.0, now)
                return
            step = self._plan_step()
        self._chunks = step.chunks
        self._began_at = now
        self._steps_in_flight = 1
        if step.chunks:
            decode_s = self.costs.decode_s(len(self._decoding), self._kv_read)
            prompt_tokens = sum([n for _, n in step.chunks])
            self.next_at = now + decode_s + self.costs.prefill_s(prompt_tokens, step.pairs)
            self._set_server_inflow(self._step_delivery_s(), now)
            return
        # A sequence that arrived too late for this step is considered again after it.
        if self._fast_forward and not step.preempted and not (self.flags.works_ahead and self._waiting.count):
            self._steps_in_flight = self._identical_steps()
        self.next_at = now + self._duration_s(self._steps_in_flight)
        self._set_server_inflow(self._step_delivery_s() * self._steps_in_flight, now)

    def _plan_step(self) -> _Step:
        """Decodes first, then running prefills, then waiting sequences, as long as tokens and KV blocks are left."""
        step = _Step()
        while self._demand.at(self.steps) > self.pool.available:
            self._preempt()
            step.preempted = True
        step.budget = self.flags.max_num_batched_tokens - len(self._decoding)
        self._continue_prefills(step)
        if step.preempted:
            step.chunks = [(sequence, tokens) for sequence, tokens in step.chunks if sequence in self._prefilling]
        else:
            self._admit_waiting(step)
        return step

    def _continue_prefills(self, step: _Step) -> None:
        pool, reserved = self.pool, self._demand.at(self.steps)
        for sequence in tuple(self._prefilling):
            if step.budget <= 0:
                break
            if sequence not in self._prefilling:
                continue  # preempted for a sequence before it
            tokens = min(step.budget, sequence.target - sequence.computed)
            while self._new_blocks(sequence, tokens) + reserved > pool.available and sequence in self._prefilling:
                self._preempt()
                step.preempted = True
                reserved = self._demand.at(self.steps)
            if sequence in self._prefilling:
                self._compute(sequence, tokens, step)

    def _admit_waiting(self, step: _Step) -> None:
        flags, pool, block = self.flags, self.pool, self.flags.block_tokens
        reserved = self._demand.at(self.steps)
        late = self._waiting.take_late(self.steps) if flags.works_ahead and (step.chunks or self._decoding) else []
        while step.budget > 0 and self.running < flags.max_num_seqs and (head := self._waiting.head()) is not None:
            hit = min(pool.hits(head.blocks), (head.target - 1) // block) if flags.prefix_caching else 0
            tokens = min(step.budget, head.target - hit * block)
            wanted = ceil((hit * block + tokens) / block) - hit
            if wanted + pool.idle_among(head.blocks, hit) + reserved > pool.available:
                break
            self._waiting.pop_head()
            self._admit(head, hit)
            self._compute(head, tokens, step)
        self._waiting.restore(late)

    def _set_server_inflow(self, work_s: float, now: float) -> None:
        """The steps that begin now give the server process `work_s` of work until they end."""
        if work_s and self.next_at is not None and self.next_at > now:
            self.server.set_inflow(work_s / (self.next_at - now), now)

    def _admit(self, sequence: EngineSequence, hit: int) -> None:
        self._prefilling[sequence] = None
        self.pool.queried_tokens += sequence.target
        self.pool.hit_tokens += hit * self.flags.block_tokens
        if hit:
            self.pool.share(sequence.blocks, hit)
            sequence.hashed_blocks = list(sequence.blocks[:hit])
            sequence.held_blocks = hit
        sequence.computed = hit * self.flags.block_tokens
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed

    def _compute(self, sequence: EngineSequence, tokens: int, step: _Step) -> None:
        """Put a chunk of the prompt into the step."""
        block = self.flags.block_tokens
        before, after = sequence.computed, sequence.computed + tokens
        new = self._new_blocks(sequence, tokens)
        self.pool.take(new)
        sequence.held_blocks += new
        if self.flags.prefix_caching:
            sequence.hashed_blocks += self.pool.publish(sequence.blocks, before // block, after // block)
        step.chunks.append((sequence, tokens))
        step.pairs += tokens * (before + after) / 2
        step.budget -= tokens

    def _new_blocks(self, sequence: EngineSequence, tokens: int) -> int:
        block = self.flags.block_tokens
        return ceil((sequence.computed + tokens) / block) - ceil(sequence.computed / block)

    def _identical_steps(self) -> int:
        """How many steps can be taken before a sequence is complete or KV blocks run out."""
        completions = self._completions
        while completions[0][2].decoding_since is None or completions[0][2].ended_at is not None:
            heappop(completions)
        most = completions[0][0] - self.steps
        available = self.pool.available
        while most > 1 and self._demand.in_steps(self.steps, most) > available:
            most -= 1
        return most

    def _duration_s(self, steps: int) -> float:
        """Duration of this many decode steps from the beginning of those in flight."""
        return self.costs.decode_steps_s(len(self._decoding), self._kv_read, steps)

    def _truncate_steps(self, now: float) -> None:
        """The state changed: the current step becomes the last of those in flight."""
        steps = self.costs.decode_steps_begun(
            len(self._decoding), self._kv_read, now - self._began_at, self._steps_in_flight
        )
        if steps < self._steps_in_flight:
            self._steps_in_flight = steps
            self.next_at = self._began_at + self._duration_s(steps)

    def _preempt(self) -> None:
        """Out of KV blocks: the last running sequence in order releases its blocks and recomputes them later."""
        victim = max((*self._decoding, *self._prefilling), key=self._waiting.rank)
        was_decoding = victim.decoding_since is not None
        self._remove(victim)
        if was_decoding:
            self._completions = [entry for entry in self._completions if entry[2] is not victim]
            heapify(self._completions)
        self.preemptions += 1
        victim.preemptions += 1
        victim.computed = 0
        victim.target = victim.prompt + victim.produced
        self._waiting.push(victim)
