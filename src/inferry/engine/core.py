"""The engine's loop: schedule, execute, postprocess. Owned by one thread; independent of sockets and torch."""

import random
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from typing import Protocol, runtime_checkable

from inferry.domain.work_costs import SOLVE_INTERVAL_STEPS, WorkCosts
from inferry.domain.work_prices import decode_s, prefill_kv_tokens, prefill_s
from inferry.domain.workers import KvBlocks
from inferry.engine.blocks import BlockPool
from inferry.engine.config import EngineConfig
from inferry.engine.messages import Account, End, Rejected, Request, Stats, StepDone
from inferry.engine.planner import Limits, Work, plan_step
from inferry.engine.prefix_keys import root_key
from inferry.engine.sequences import Sequence


class Runner(Protocol):
    """Executes planned work on the model. Token ids must be below `vocab_size`."""

    @property
    def context_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def execute(self, work: Ordered[Work]) -> list[int]:
        """Compute the work; return one sampled token for each item that reaches its sequence's end, in order. A pooled
        sequence has no token: at its end its `result` is set.
        """


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """Computes a launched step while the next one is planned. Steps are computed and collected in order."""

    def launch(self, work: Ordered[Work]) -> None:
        """Start to compute the work. A pending token `UNKNOWN` is the one that the step before it samples."""

    def collect(self) -> list[int]:
        """Wait for the oldest step in flight; return its tokens as `execute` does."""


UNKNOWN = -1
"""Stands for a token that is being sampled."""


class _Blocking:
    """Launches steps of a runner that computes them at once."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sampled: list[int] = []

    def launch(self, work: Ordered[Work]) -> None:
        self._sampled = self._runner.execute(work)

    def collect(self) -> list[int]:
        return self._sampled


class _Step:
    """A launched step. `ends`: by piece, the tokens of its sequence that are computed then. `sampled`: sequences that
    get a token, and its place. `weights`: modelled seconds by piece.
    """

    __slots__ = ("ends", "pooled", "sampled", "started", "weights", "work")

    def __init__(self, work: tuple[Work, ...], weights: list[float], started: float) -> None:
        self.work = work
        self.weights = weights
        self.started = started
        self.ends: list[int] = []
        self.sampled: list[tuple[Sequence, int]] = []
        self.pooled: list[Sequence] = []


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
        clock: Callable[[], float] = time.perf_counter,
        make_seed: Callable[[], int] | None = None,
    ) -> None:
        self._runner = runner
        is_overlapping = isinstance(runner, OverlappingRunner)
        self._steps_runner = runner if isinstance(runner, OverlappingRunner) else _Blocking(runner)
        self._max_in_flight = 2 if is_overlapping else 1
        self._in_flight: deque[_Step] = deque()
        self._collected_at = 0.0
        self._clock = clock
        self._make_seed = make_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._limits = Limits(
            max_sequences=config.max_sequences, chunk_tokens=config.chunk_tokens, block_tokens=config.block_tokens
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
        self._was_held_back = False
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._costs = WorkCosts(is_exact=True)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: Request) -> Rejected | None:
        rejection = self._rejection(request)
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
            arrival=self._arrivals,
            limit=min(len(prompt) + new_tokens, self.context_tokens, self.kv_tokens),
            seed=self._make_seed() if sampling.seed is None else sampling.seed,
            stop_ids=eos | frozenset(sampling.stop_token_ids),
            is_pooled=request.pooled,
            # The mean of a pooled sequence is over the hidden states of all its tokens, so all are computed.
            root_key=None if self._shared is None or request.pooled else root_key(request.salt),
            run=request.run if self._kv_pause_s else None,
            kv_quota=request.kv_quota,
        )
        self._sequences[request.key] = sequence
        insort(self._waiting, sequence, key=_rank)
        return None

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
        while len(self._in_flight) < self._max_in_flight:
            started = self._clock()
            work = self._schedule()
            if not work:
                break
            self._launch(work, started)
        if not self._in_flight:
            return StepDone([], [], self.stats())
        sampled = self._steps_runner.collect()
        self._steps += 1
        return self._postprocess(self._in_flight.popleft(), sampled)

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
        )

    def _rejection(self, request: Request) -> Rejected | None:
        tokens = len(request.prompt_ids)
        if request.key in self._sequences:
            return Rejected(request.key, False, "the key is already in use")
        if tokens == 0:
            return Rejected(request.key, False, "the prompt is empty")
        wrong = self._pooled_rejection(request) if request.pooled else self._length_rejection(request)
        if wrong is not None:
            return wrong
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self._runner.vocab_size:
            return Rejected(request.key, False, f"the prompt has token ids outside 0 to {self._runner.vocab_size - 1}")
        return None

    def _length_rejection(self, request: Request) -> Rejected | None:
        tokens = len(request.prompt_ids)
        if request.sampling.max_tokens < 1:
            return Rejected(request.key, False, "max_tokens must be at least 1")
        if tokens >= self.context_tokens:
            return Rejected(
                request.key,
                True,
                f"the prompt has {tokens} tokens; the context of {self.context_tokens} tokens leaves none for output",
            )
        if tokens >= self.kv_tokens:
            return Rejected(request.key, True, f"the prompt has {tokens} tokens; the KV cache holds {self.kv_tokens}")
        return None

    def _pooled_rejection(self, request: Request) -> Rejected | None:
        """A pooled sequence has no output and may fill the context."""
        tokens, limit = len(request.prompt_ids), min(self.context_tokens, self.kv_tokens)
        if tokens <= limit:
            return None
        return Rejected(request.key, True, f"the input has {tokens} tokens; the limit is {limit} tokens")

    def _schedule(self) -> tuple[Work, ...]:
        if self.pool.kept:
            self.pool.expire(self._clock())
        plan = plan_step(
            self._running,
            self._waiting,
            self.pool.free,
            self._limits,
            may_hold=not self._was_held_back,
            shared=self._shared,
        )
        self._was_held_back = plan.held_back
        for sequence in plan.preempted:
            self._running.remove(sequence)
            self.pool.release(sequence.key)
            sequence.blocks = []
            sequence.computed = sequence.named_blocks = 0
            sequence.preemptions += 1
            self._preemptions += 1
            insort(self._waiting, sequence, key=_rank)
        for sequence in plan.admitted:
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_rank)
            if sequence.root_key is not None:
                self._claim_prefix(sequence)
        for work in plan.work:
            sequence = work.sequence
            sequence.blocks = self.pool.extend(sequence.key, len(sequence.tokens))
        return plan.work

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

    def _name_blocks(self, step: _Step) -> None:
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

    def _launch(self, work: tuple[Work, ...], started: float) -> None:
        """Start the step and take its sequences as computed. Its tokens are unknown; stop tokens are found later."""
        step = _Step(work, self._weights(work), started)
        self._steps_runner.launch(work)
        for piece in work:
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

    def _postprocess(self, step: _Step, sampled: list[int]) -> StepDone:
        tokens: list[tuple[int, int]] = []
        pooled: list[tuple[int, bytes]] = []
        ended: list[tuple[Sequence, bool]] = []
        self._name_blocks(step)
        for sequence in step.pooled:
            if sequence.key in self._sequences:
                pooled.append((sequence.key, sequence.result))
                ended.append((sequence, True))
        for (sequence, place), token in zip(step.sampled, sampled, strict=True):
            if sequence.key not in self._sequences:
                continue  # it ended or was aborted after this step was launched
            sequence.tokens[place] = token
            tokens.append((sequence.key, token))
            if token in sequence.stop_ids:
                ended.append((sequence, True))
            elif place + 1 >= sequence.limit:
                ended.append((sequence, False))
        now = self._clock()
        self._charge(step, now - max(step.started, self._collected_at))
        self._collected_at = now
        for sequence, _ in ended:
            self._remove(sequence)
        ends = [End(_account(sequence), stopped) for sequence, stopped in ended]
        return StepDone(tokens, ends, self.stats(), pooled)

    def _weights(self, work: tuple[Work, ...]) -> list[float]:
        """Modelled seconds of each piece: what it adds to the step, and an even part of what the step costs at all."""
        costs, base_s = self._costs, self._costs.base_s / len(work)
        return [
            base_s + decode_s(costs, 1, piece.sequence.computed)
            if piece.tokens == 1  # a prompt of one token costs as much
            else base_s + prefill_s(costs, piece.tokens, piece.sequence.computed + piece.tokens)
            for piece in work
        ]

    def _charge(self, step: _Step, seconds: float) -> None:
        """Divide the time of the step by the weights of its pieces, and learn the costs from it."""
        self.busy_seconds += seconds
        self._step_tokens, self._step_seconds = sum(piece.tokens for piece in step.work), seconds
        scale = seconds / sum(step.weights)
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
        self._costs.add(seconds, seconds, 1, decoded, prompt_tokens, kv_tokens)
        if self._steps % SOLVE_INTERVAL_STEPS == 0:
            self._costs.solve()

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
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
