"""The engine's loop: schedule, execute, postprocess. Owned by one thread; independent of sockets and torch."""

import random
import time
from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from typing import Protocol

from inferry.domain.work_costs import SOLVE_INTERVAL_STEPS, WorkCosts
from inferry.domain.work_prices import decode_s, prefill_kv_tokens, prefill_s
from inferry.engine.blocks import BlockPool
from inferry.engine.config import EngineConfig
from inferry.engine.messages import Account, End, Rejected, Request, Stats, StepDone
from inferry.engine.planner import Limits, Work, plan_step
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
        self._clock = clock
        self._make_seed = make_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._limits = Limits(
            max_sequences=config.max_sequences, chunk_tokens=config.chunk_tokens, block_tokens=config.block_tokens
        )
        self.pool = BlockPool(config.blocks, config.block_tokens)
        self.context_tokens = min(runner.context_tokens, config.context_tokens or runner.context_tokens)
        self.kv_tokens = self.pool.total * self.pool.block_tokens
        self.busy_seconds = 0.0
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._arrivals = 0
        self._steps = 0
        self._preemptions = 0
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
        """Run one step. Without work nothing changes."""
        started = self._clock()
        work = self._schedule()
        if not work:
            return StepDone([], [], self.stats())
        sampled = self._runner.execute(work)
        self._steps += 1
        return self._postprocess(work, sampled, started)

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
        plan = plan_step(self._running, self._waiting, self.pool.free, self._limits, may_hold=not self._was_held_back)
        self._was_held_back = plan.held_back
        for sequence in plan.preempted:
            self._running.remove(sequence)
            self.pool.release(sequence.key)
            sequence.blocks = []
            sequence.computed = 0
            sequence.preemptions += 1
            self._preemptions += 1
            insort(self._waiting, sequence, key=_rank)
        for sequence in plan.admitted:
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_rank)
        for work in plan.work:
            sequence = work.sequence
            sequence.blocks = self.pool.extend(sequence.key, len(sequence.tokens))
        return plan.work

    def _postprocess(self, work: tuple[Work, ...], sampled: list[int], started: float) -> StepDone:
        tokens: list[tuple[int, int]] = []
        pooled: list[tuple[int, bytes]] = []
        ended: list[tuple[Sequence, bool]] = []
        fresh = iter(sampled)
        weights = self._weights(work)
        for piece in work:
            sequence = piece.sequence
            sequence.computed += piece.tokens
            if sequence.computed < len(sequence.tokens):
                continue
            if sequence.is_pooled:
                pooled.append((sequence.key, sequence.result))
                ended.append((sequence, True))
                continue
            token = next(fresh)
            sequence.tokens.append(token)
            tokens.append((sequence.key, token))
            if token in sequence.stop_ids:
                ended.append((sequence, True))
            elif len(sequence.tokens) >= sequence.limit:
                ended.append((sequence, False))
        self._charge(work, weights, self._clock() - started)
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

    def _charge(self, work: tuple[Work, ...], weights: list[float], seconds: float) -> None:
        """Divide the time of the step by the weights of its pieces, and learn the costs from it."""
        self.busy_seconds += seconds
        self._step_tokens, self._step_seconds = sum(piece.tokens for piece in work), seconds
        scale = seconds / sum(weights)
        decoded = prompt_tokens = 0
        kv_tokens = 0.0
        for piece, weight in zip(work, weights, strict=True):
            sequence = piece.sequence
            sequence.gpu_seconds += scale * weight
            if piece.tokens == 1:
                decoded += 1
                kv_tokens += sequence.computed
            else:
                prompt_tokens += piece.tokens
                kv_tokens += prefill_kv_tokens(piece.tokens, sequence.computed)
        self._costs.add(seconds, seconds, 1, decoded, prompt_tokens, kv_tokens)
        if self._steps % SOLVE_INTERVAL_STEPS == 0:
            self._costs.solve()

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self.pool.release(sequence.key)
        place = self._running if sequence in self._running else self._waiting
        place.remove(sequence)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _account(sequence: Sequence) -> Account:
    return Account(sequence.key, sequence.prompt_tokens, sequence.output_tokens, sequence.gpu_seconds)
