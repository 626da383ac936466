"""The engine's loop: schedule, execute, postprocess. Owned by one thread; independent of sockets and torch."""

import random
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from inferry.domain.work_costs import SOLVE_INTERVAL_STEPS, WorkCosts
from inferry.domain.work_prices import decode_s, prefill_kv_tokens, prefill_s
from inferry.domain.workers import KvBlocks
from inferry.engine.blocks import BlockPool
from inferry.engine.config import EngineConfig
from inferry.engine.grammars import NOT_STARTED, Grammars
from inferry.engine.launched_step import LaunchedStep
from inferry.engine.messages import Account, End, Rejected, Request, Stats, StepDone, TokenLogprobs
from inferry.engine.modes import planner_of
from inferry.engine.padding import padding_work
from inferry.engine.planner import NO_PADDING, Limits, StepPlan, Work
from inferry.engine.prefix_keys import root_key
from inferry.engine.rejections import EngineLimits, rejection_of
from inferry.engine.runners import UNKNOWN, BlockingSteps, OverlappingRunner, Runner, without_awaiting
from inferry.engine.sequences import Sequence

_MIXED_COST = 1.5
"""What prompt tokens beside decodes may cost, in fixed costs of a step, where phases of their own would be frequent."""

_COMPILE_WAIT_S = 0.02
"""How long a step without other work waits for a grammar. Messages are read between steps."""
_TOO_COMPLEX = "it became too complex to match"


class EngineCore:
    """Sequences in, tokens out, one step at a time.

    Rule: every added key ends exactly once, as a rejection, an end or an abort, and then holds no block. The time of a
    step is divided among its sequences by what it did for them (`domain.work_costs`), so that their accounts sum to the
    time of all steps.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
        make_seed: Callable[[], int] | None = None,
    ) -> None:
        self._runner = runner
        is_overlapping = isinstance(runner, OverlappingRunner)
        self._steps_runner = runner if isinstance(runner, OverlappingRunner) else BlockingSteps(runner)
        self._max_in_flight = 2 if is_overlapping else 1
        self._in_flight: deque[LaunchedStep] = deque()
        self._collected_at = 0.0
        self._grammars = grammars
        self._constrained = 0
        self._clock = clock
        self._make_seed = make_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._costs = WorkCosts(is_exact=True)
        self._decode_wait_s = config.decode_wait_ms / 1000
        self._planner = planner_of(config.mode)
        self._limits = self._limit_phases(
            Limits(
                max_sequences=config.max_sequences, chunk_tokens=config.chunk_tokens, block_tokens=config.block_tokens
            )
        )
        self.pool = BlockPool(config.blocks, config.block_tokens)
        self._shared = self.pool if config.prefix_cache else None
        self._kv_pause_s = config.kv_pause_s
        self.context_tokens = min(runner.context_tokens, config.context_tokens or runner.context_tokens)
        self.kv_tokens = self.pool.total * self.pool.block_tokens
        self.busy_seconds = 0.0
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._arrivals = 0
        self._steps = 0
        self._preemptions = 0
        self._prefix_queries = self._prefix_hits = 0
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._prompt_tokens = self._decode_rows = self._padding_tokens = self._padding_rows = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: Request) -> Rejected | None:
        if request.key in self._sequences:
            return Rejected(request.key, False, "the key is already in use")
        limits = EngineLimits(self.context_tokens, self.kv_tokens, self._runner.vocab_size, self._grammars is not None)
        rejection = rejection_of(request, limits)
        if rejection is not None:
            return rejection
        prompt, sampling = request.prompt_ids, request.sampling
        new_tokens = 0 if request.pooled else sampling.max_tokens
        eos = frozenset() if sampling.ignore_eos else self._runner.eos_ids
        self._arrivals += 1
        sequence = Sequence(
            request.key,
            prompt,
            sampling=sampling,
            lane=request.lane,
            is_batch=request.is_batch,
            arrival=self._arrivals,
            limit=min(len(prompt) + new_tokens, self.context_tokens, self.kv_tokens),
            seed=self._make_seed() if sampling.seed is None else sampling.seed,
            stop_ids=eos | frozenset(sampling.stop_token_ids),
            is_pooled=request.pooled,
            # The mean of a pooled sequence is over the hidden states of all its tokens, so all are computed.
            root_key=None if self._shared is None or request.pooled else root_key(request.salt, request.adapter),
            run=request.run if self._kv_pause_s else None,
            kv_quotas=request.kv_quotas,
            batch=request.batch,
            adapter=request.adapter,
        )
        self._sequences[request.key] = sequence
        constraint = sampling.constraint
        if constraint is not None and self._grammars is not None:
            self._constrained += 1
            self._grammars.start(sequence, constraint, prompt[len(prompt) - request.output_ids :], self._clock())
        else:
            insort(self._waiting, sequence, key=_rank)
        return None

    def uses_adapter(self, adapter: int) -> bool:
        return any(sequence.adapter == adapter for sequence in self._sequences.values())

    def abort(self, keys: Iterable[int]) -> list[Account]:
        """Free these sequences; return the accounts of those that had not ended."""
        freed: list[Account] = []
        for key in keys:
            sequence = self._sequences.get(key)
            if sequence is not None:
                self._remove(sequence)
                freed.append(_account(sequence))
        return freed

    def step(self) -> StepDone:
        """Run one step, or wait for the oldest in flight. Without work nothing changes."""
        ends = self._start_compiled() if self._constrained else []
        while len(self._in_flight) < self._max_in_flight:
            started = self._clock()
            plan = self._schedule()
            if not plan.work and plan.padding == NO_PADDING:
                break
            self._launch(plan, started)
        if not self._in_flight:
            return StepDone([], ends, self.stats())
        sampled = self._steps_runner.collect()
        self._steps += 1
        return self._postprocess(self._in_flight.popleft(), sampled, ends)

    def stats(self) -> Stats:
        return Stats(
            steps=self._steps,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens=(self.pool.total - self.pool.free) * self.pool.block_tokens,
            free_blocks=self.pool.free,
            preemptions=self._preemptions,
            step_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
            busy_seconds=self.busy_seconds,
            kv_blocks=KvBlocks(
                self.pool.total,
                self.pool.held,
                self.pool.cached,
                self.pool.kept,
                self.pool.span,
                self._prefix_queries,
                self._prefix_hits,
            ),
            prompt_tokens=self._prompt_tokens,
            decode_rows=self._decode_rows,
            padding_tokens=self._padding_tokens,
            padding_rows=self._padding_rows,
        )

    def _start_compiled(self) -> list[End]:
        """Let sequences wait whose grammars are compiled; the ends of those whose grammars are invalid."""
        grammars = self._grammars
        if grammars is None or not grammars.is_compiling:
            return []
        is_idle = not (self._running or self._waiting or self._in_flight)
        ends: list[End] = []
        for sequence, error in grammars.collect(self._clock(), _COMPILE_WAIT_S if is_idle else 0.0):
            if error is None and sequence.matcher is not None and not sequence.matcher.is_complete:
                insort(self._waiting, sequence, key=_rank)
                continue
            # Without an error, a resumed sequence had written all of its output.
            self._remove(sequence)
            ends.append(End(_account(sequence), error is None, error, error == NOT_STARTED))
        return ends

    def _schedule(self) -> StepPlan:
        if self.pool.kept:
            self.pool.expire(self._clock())
        plan, planner = self._planner.plan(self._running, self._waiting, self.pool.free, self._limits, self._shared)
        if self._constrained and self._in_flight:
            plan = without_awaiting(plan)
            if not plan.work and plan.padding == NO_PADDING:
                return plan
        self._planner = planner
        for sequence in plan.preempted:
            if sequence in self._running:  # else it waits, and was prepared
                self._running.remove(sequence)
                insort(self._waiting, sequence, key=_rank)
            self.pool.release(sequence.key)
            sequence.blocks = []
            sequence.computed = sequence.named_blocks = 0
            sequence.preemptions += 1
            self._preemptions += 1
        for sequence in plan.admitted:
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_rank)
        for work in plan.work:
            if work.sequence.root_key is not None and not work.sequence.blocks:
                self._claim_prefix(work.sequence)
        for work in plan.work:
            sequence = work.sequence
            sequence.blocks = self.pool.extend(sequence.key, len(sequence.tokens))
        return plan

    def _claim_prefix(self, sequence: Sequence) -> None:
        """Start the sequence after the blocks that are there already: of others, or its own before a preemption."""
        found = self.pool.find(sequence.prefix_keys(self.pool.block_tokens))
        self.pool.claim(sequence.key, found)
        sequence.named_blocks = len(found)
        sequence.computed = len(found) * self.pool.block_tokens
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
            self._prefix_queries += sequence.prompt_tokens
            self._prefix_hits += sequence.computed

    def _name_blocks(self, step: LaunchedStep) -> None:
        """Put the blocks that the step filled into the prefix cache. Their tokens are known by now.

        A sequence that was preempted after the launch has given up its blocks; it has less computed than at the launch.
        """
        size = self.pool.block_tokens
        for piece, end in zip(step.work, step.ends, strict=True):
            sequence, full = piece.sequence, end // size
            if sequence.root_key is None or full <= sequence.named_blocks or end > sequence.computed:
                continue
            if sequence.key in self._sequences:
                keys = sequence.block_keys(sequence.named_blocks, full, size)
                self.pool.name(sequence.key, sequence.named_blocks, keys)
                sequence.named_blocks = full

    def _launch(self, plan: StepPlan, started: float) -> None:
        """Start the step and take its sequences as computed. Its tokens are unknown; stop tokens are found later."""
        step = LaunchedStep(plan, self._running, self._weights(plan.work), started)
        if step.members:
            # The runner has one block more than the pool (`EngineConfig.cache_blocks`).
            padding = padding_work(plan.padding, step.longest, self.pool.total, self.pool.block_tokens)
            self._steps_runner.launch((*plan.work, *padding))
        else:
            self._steps_runner.launch(plan.work)
        for piece in plan.work:
            sequence = piece.sequence
            sequence.computed += piece.tokens
            step.ends.append(sequence.computed)
            if sequence.pending:
                continue
            if sequence.is_pooled:
                step.pooled.append(sequence)
                self._running.remove(sequence)
                continue
            step.sampled.append((sequence, len(sequence.tokens)))
            sequence.tokens.append(UNKNOWN)
            if len(sequence.tokens) >= sequence.limit:
                self._running.remove(sequence)
        self._in_flight.append(step)

    def _postprocess(self, step: LaunchedStep, sampled: list[int], ends: list[End]) -> StepDone:
        tokens: list[tuple[int, int]] = []
        pooled: list[tuple[int, bytes]] = []
        logprobs: list[TokenLogprobs] = []
        ended: list[tuple[Sequence, bool, str | None]] = []
        self._name_blocks(step)
        for sequence in step.pooled:
            if sequence.key in self._sequences:
                pooled.append((sequence.key, sequence.result))
                ended.append((sequence, True, None))
        # Tokens of padding come last and are dropped.
        for (sequence, place), token in zip(step.sampled, sampled, strict=step.padding == NO_PADDING):
            if sequence.key not in self._sequences:
                continue  # it ended or was aborted after this step was launched
            sequence.tokens[place] = token
            tokens.append((sequence.key, token))
            if sequence.logprobs is not None:
                logprobs.append(TokenLogprobs(sequence.key, *sequence.logprobs))
            matcher = sequence.matcher
            if matcher is not None and not matcher.consume(token):
                ended.append((sequence, False, _TOO_COMPLEX))
            elif token in sequence.stop_ids or (matcher is not None and matcher.is_complete):
                ended.append((sequence, True, None))
            elif place + 1 >= sequence.limit:
                ended.append((sequence, False, None))
        now = self._clock()
        self._charge(step, now - max(step.started, self._collected_at))
        self._collected_at = now
        for sequence, _, _ in ended:
            self._remove(sequence)
        ends += [End(_account(sequence), stopped, error) for sequence, stopped, error in ended]
        return StepDone(tokens, ends, self.stats(), pooled, logprobs)

    def _weights(self, work: tuple[Work, ...]) -> list[float]:
        """Modelled seconds of each piece: what it adds to the step, and an even part of what the step costs at all."""
        costs, base_s = self._costs, self._costs.base_s / max(1, len(work))
        return [
            base_s + decode_s(costs, 1, piece.sequence.computed)
            if piece.tokens == 1  # a prompt of one token costs as much
            else base_s + prefill_s(costs, piece.tokens, piece.sequence.computed + piece.tokens)
            for piece in work
        ]

    def _charge(self, step: LaunchedStep, seconds: float) -> None:
        """Divide the time of the step by the weights of its pieces, and learn the costs from it.

        The time of padding is that of the pieces beside it; a step of padding alone is divided evenly.
        """
        self.busy_seconds += seconds
        scale = seconds / sum(step.weights) if step.weights else 0.0
        decoded = prompt_tokens = 0
        kv_tokens = 0.0
        for piece, end, weight in zip(step.work, step.ends, step.weights, strict=True):
            piece.sequence.gpu_seconds += scale * weight
            if piece.tokens == 1:
                decoded += 1
                kv_tokens += end
            else:
                prompt_tokens += piece.tokens
                kv_tokens += prefill_kv_tokens(piece.tokens, end)
        self._step_tokens, self._step_seconds = decoded + prompt_tokens, seconds
        self._decode_rows += decoded
        self._prompt_tokens += prompt_tokens
        if step.members:
            padding, padding_tokens = step.padding, sum(step.padding.prompts)
            self._padding_rows += padding.rows
            self._padding_tokens += padding_tokens
            decoded += padding.rows
            prompt_tokens += padding_tokens
            kv_tokens += padding.rows * step.longest + sum(prefill_kv_tokens(n, n) for n in padding.prompts)
            if not step.work:
                for sequence in step.members:
                    sequence.gpu_seconds += seconds / len(step.members)
        self._costs.add(seconds, seconds, 1, decoded, prompt_tokens, kv_tokens)
        if self._steps % SOLVE_INTERVAL_STEPS == 0:
            self._costs.solve()
            self._limits = self._limit_phases(self._limits)

    def _limit_phases(self, limits: Limits) -> Limits:
        """Prompt tokens by their modelled time: of a phase within the time that decodes may wait, but at least a chunk;
        beside decodes within `_MIXED_COST`, but at least a block.
        """
        costs, chunk_tokens = self._costs, limits.chunk_tokens
        phase_tokens = self._decode_wait_s / (costs.prompt_s + costs.base_s / chunk_tokens)
        mixed_tokens = _MIXED_COST * costs.base_s / costs.prompt_s
        return replace(
            limits,
            phase_tokens=max(chunk_tokens, int(phase_tokens)),
            mixed_tokens=max(limits.block_tokens, min(chunk_tokens, int(mixed_tokens))),
        )

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        if self._grammars is not None and sequence.sampling.constraint is not None:
            self._constrained -= 1
            self._grammars.discard(sequence.key)
        if sequence.run is None:
            self.pool.release(sequence.key)
        else:
            self.pool.release(sequence.key, sequence.run, self._clock() + self._kv_pause_s)
        for place in (self._running, self._waiting):
            if sequence in place:
                place.remove(sequence)
        while sequence.tokens[-1] == UNKNOWN:
            sequence.tokens.pop()


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _account(sequence: Sequence) -> Account:
    return Account(
        sequence.key, sequence.prompt_tokens, sequence.output_tokens, sequence.gpu_seconds, sequence.cached_tokens
    )
