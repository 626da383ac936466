"""The simulation: agents play their runs, a front end sends their calls, engines serve them, in virtual time.

The simulation owns time, calls and engines; a front end only decides when a call is sent to which engine. A call passes
agent -> front end -> server process -> engine. It ends exactly once, and then its run continues.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.sim.calls import Call, CallRow, Outcome, Run, RunRow
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.events import Events
from inferry.sim.prompts import GrowingPrompt, Piece, block_hashes, length
from inferry.sim.sequence import EngineSequence, FirstTokenEvent

PRIORITIES = {Lane.P0: -10, Lane.P1: 0, Lane.P2: 10}
HashMemo = dict[tuple[int, int, tuple[Piece, ...]], tuple[int, ...]]
"""Block hashes computed before; simulations of the same runs may share them."""
HARBOR_ITL_S = {Lane.P0: 0.030, Lane.P1: 0.050, Lane.P2: 0.5}


class Frontend(Protocol):
    """Sends the calls of agents to engines. It is notified of a call's first token and of its end."""

    def open(self, simulation: "Simulation") -> None: ...

    def dispatch(self, call: Call, now: float) -> None:
        """An agent makes the call; the front end passes it to `simulation.send` now or later."""

    def first_token(self, call: Call, now: float) -> None: ...

    def ended(self, call: Call, now: float) -> None:
        """A call that was sent has ended. It may be sent again if it was evicted or its engine was lost."""

    def engine_lost(self, worker: int, now: float) -> None:
        """The engine is gone; the ends of its calls follow."""

    def cancel(self, call: Call, now: float) -> None:
        """The agent cancelled: drop the call, or `simulation.abort` it if it was sent."""


class Simulation:
    """Plays runs against engines behind a front end. `rows` and `runs` are the results.

    There are `workers` equal engines, or one for each of the `flags`. With `on_call` and `on_run`, rows are passed on
    and not kept, so that memory depends only on the calls in progress.
    """

    def __init__(
        self,
        frontend: Frontend,
        costs: CostModel,
        flags: EngineFlags | Sequence[EngineFlags],
        *,
        workers: int = 1,
        itl_s: Mapping[Lane, float] = HARBOR_ITL_S,
        ttft_s_per_1k_tokens: Mapping[Lane, float] | None = None,
        is_lost: Callable[[Call], bool] | None = None,
        fast_forward: bool = True,
        hashes: HashMemo | None = None,
        on_call: Callable[[CallRow], None] | None = None,
        on_run: Callable[[RunRow], None] | None = None,
    ) -> None:
        all_flags = [flags] * workers if isinstance(flags, EngineFlags) else flags
        self.events = Events()
        self.costs = costs
        self.flags = all_flags[0]
        self.engines = [Engine(costs, one, fast_forward=fast_forward) for one in all_flags]
        self.live = list(range(len(self.engines)))
        self.rows: list[CallRow] = []
        self.runs: list[RunRow] = []
        self._on_call = on_call or self.rows.append
        self._on_run = on_run or self.runs.append
        self._frontend = frontend
        self._itl_s = dict(itl_s)
        self._ttft_s_per_1k_tokens = ttft_s_per_1k_tokens or {}
        self._is_lost = is_lost
        self._followers: Iterator[Run] | None = None
        self._due: list[float | None] = [None] * len(self.engines)
        self._calls = 0
        self._current: dict[str, Call] = {}
        self._salts: dict[str, int] = {}
        self._hashes = hashes
        self._prompts: dict[str, GrowingPrompt] = {}
        frontend.open(self)

    def play(
        self, runs: Iterable[Run], until: float | None = None, on_progress: Callable[[float], None] | None = None
    ) -> None:
        """Play until everything has ended. The same runs and front end give the same rows, byte for byte."""
        for run in runs:
            self.events.at(run.at, self._begin_run, run)
        self.events.run(until, on_progress)

    def play_stream(self, runs: Iterator[Run], on_progress: Callable[[float], None] | None = None) -> None:
        """As `play`, for runs from an iterator, in order of time; it is read one run ahead."""
        self._schedule_next_run(runs)
        self.events.run(None, on_progress)

    def play_sessions(
        self,
        runs: Iterator[Run],
        sessions: int,
        until: float | None,
        ramp_s: float = 0.0,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """A closed loop: `sessions` runs at a time, each followed by the next one when it has ended.

        The first ones begin spread over `ramp_s`. The times of the runs themselves are not used. It ends at `until`, or
        with the last run.
        """
        self._followers = runs
        for number, run in enumerate(islice(runs, sessions)):
            at = ramp_s * number / sessions
            self.events.at(at, self._begin_run, replace(run, at=at))
        self.events.run(until, on_progress)

    def kill(self, worker: int, at: float) -> None:
        """The engine is gone from this time on, after the step in flight. Its calls are retried, or fail."""
        self.events.at(at, self._kill, worker)

    def waits_for_first_token(self, now: float) -> list[float]:
        """How long the calls in progress without a first token have waited, in seconds."""
        calls = self._current.values()
        return [now - call.at for call in calls if call.state != "over" and call.first_at is None]

    def _end_run(self, row: RunRow) -> None:
        self._on_run(row)
        if self._followers is not None and (run := next(self._followers, None)) is not None:
            at = row.at + row.latency_s
            self.events.at(at, self._begin_run, replace(run, at=at))

    @property
    def busy_s(self) -> Sequence[float]:
        return [engine.busy_s for engine in self.engines]

    # Agents.

    def _schedule_next_run(self, runs: Iterator[Run]) -> None:
        run = next(runs, None)
        if run is not None:
            if run.at < self.events.now:
                raise ValueError(f"{run.run_id} begins before the run ahead of it")
            self.events.at(run.at, self._arrive, (run, runs))

    def _arrive(self, now: float, argument: tuple[Run, Iterator[Run]]) -> None:
        run, remaining = argument
        self._schedule_next_run(remaining)
        self._begin_run(now, run)

    def _begin_run(self, now: float, run: Run) -> None:
        if run.cancel_after_s is not None:
            self.events.at(now + run.cancel_after_s, self._abandon, run)
        self._begin_step(now, (run, 0))

    def _begin_step(self, now: float, argument: tuple[Run, int]) -> None:
        run, index = argument
        if run.cancel_after_s is not None and run.run_id not in self._current and index:
            return
        self._calls += 1
        call = Call(f"{run.run_id}/{index}", self._calls, run, index, length(run.steps[index].prompt), now)
        self._current[run.run_id] = call
        self._frontend.dispatch(call, now)

    def _abandon(self, now: float, run: Run) -> None:
        call = self._current.pop(run.run_id, None)
        if call is None:
            return
        self._prompts.pop(run.run_id, None)
        self._end_run(RunRow(run.run_id, run.lane, run.tenant, run.at, now - run.at, len(run.steps), False, True))
        if call.state != "over":
            call.cancelled = True
            self._record_call(call, now, "cancelled")
            self._frontend.cancel(call, now)

    def _finish_call(self, call: Call, now: float, outcome: Outcome) -> None:
        """The call ended for its agent: record it, and continue or break the run."""
        self._record_call(call, now, outcome)
        run = call.run
        if outcome == "done" and call.index + 1 < len(run.steps):
            self.events.at(now + call.step.tool_s, self._begin_step, (run, call.index + 1))
            return
        # The last tool time is part of the run.
        ended = now + (call.step.tool_s if outcome == "done" else 0.0)
        if run.cancel_after_s is not None and ended >= run.at + run.cancel_after_s:
            return  # it cancels during the tool time
        self._current.pop(run.run_id, None)
        self._prompts.pop(run.run_id, None)
        self._end_run(
            RunRow(run.run_id, run.lane, run.tenant, run.at, ended - run.at, len(run.steps), outcome == "done", False)
        )

    def _record_call(self, call: Call, now: float, outcome: Outcome) -> None:
        call.state = "over"
        run, sequence = call.run, call.sequence
        late = cached = None
        produced = call.produced
        if isinstance(sequence, EngineSequence):
            cached = sequence.cached_tokens
            if outcome == "done":
                late = call.late_at - call.at
                late -= self._ttft_s_per_1k_tokens.get(run.lane, 0.0) * (call.prompt - cached) / 1000
                produced = call.step.output
        self._on_call(
            CallRow(
                run.run_id,
                call.step.name,
                run.tenant,
                run.lane,
                call.prompt,
                call.step.output,
                call.at,
                None if call.first_at is None else call.first_at - call.at,
                now - call.at,
                late,
                outcome,
                produced,
                cached or 0,
                None if call.sent_at is None else call.sent_at - call.at,
                call.worker,
            )
        )

    # Calls from the front end.

    def send(self, call: Call, worker: int, now: float) -> None:
        """Send the call to a worker. Requests pass its server process one after the other."""
        call.worker = worker
        if call.sent_at is None:
            call.sent_at = now
        call.state = "sent"
        if self._is_lost is not None and self._is_lost(call):
            self.events.at(now, self._reset, call)
            return
        call.server_turns = self.engines[worker].costs.request_turns
        self._take_server_turn(now, call)

    def abort(self, call: Call, now: float) -> None:
        """Close the call's connection; the front end gets `ended` when the engine has dropped it."""
        sequence = call.sequence
        if not isinstance(sequence, EngineSequence):
            call.lost = True  # still in the server process, which checks for it
            return
        if sequence.ended_at is not None:
            return  # complete; its end is already scheduled
        assert call.worker is not None
        if self.engines[call.worker].abort(sequence, now):
            self.events.at(now, self._ended, call)
        self._schedule_step(call.worker)

    def reject(self, call: Call, now: float, outcome: Outcome) -> None:
        """End a call that was never sent."""
        self._finish_call(call, now, outcome)

    # Engines.

    def _reset(self, now: float, call: Call) -> None:
        self._frontend.ended(call, now)
        if call.state != "over":
            self._finish_call(call, now, "failed")

    def _take_server_turn(self, now: float, call: Call) -> None:
        assert call.worker is not None
        call.server_turns -= 1
        through_at = self.engines[call.worker].receive(call.prompt, now)
        self.events.at(through_at, self._take_server_turn if call.server_turns and not call.lost else self._enter, call)

    def _enter(self, now: float, call: Call) -> None:
        if call.lost:
            call.lost = False
            self._frontend.ended(call, now)
            return
        run = call.run
        assert call.worker is not None
        if call.worker not in self.live:
            call.worker_lost = True
            self._ended(now, call)
            return
        engine = self.engines[call.worker]
        blocks: tuple[int, ...] = ()
        if engine.flags.prefix_caching:
            blocks = self._block_hashes(run, call.step.prompt, engine.flags.block_tokens)
        sequence = EngineSequence(
            call.job_id,
            call.prompt + call.produced,
            call.step.output - call.produced,
            priority=PRIORITIES[run.lane],
            blocks=blocks,
            itl_s=self._itl_s.get(run.lane),
            tag=call,
        )
        call.sequence = sequence
        engine.submit(sequence, now)
        self._schedule_step(call.worker)

    def _block_hashes(self, run: Run, prompt: tuple[Piece, ...], block_tokens: int) -> tuple[int, ...]:
        salt = self._salts.setdefault(run.tenant, len(self._salts) + 1)
        memo = self._hashes
        if memo is None:
            if len(run.steps) == 1 or block_tokens != self.flags.block_tokens:
                return block_hashes(prompt, block_tokens, salt)
            known = self._prompts.get(run.run_id)
            if known is None:
                known = self._prompts[run.run_id] = GrowingPrompt(block_tokens, salt)
            return known.block_hashes(prompt)
        key = (block_tokens, salt, prompt)
        found = memo.get(key)
        if found is None:
            found = memo[key] = block_hashes(prompt, block_tokens, salt)
        return found

    def _kill(self, now: float, worker: int) -> None:
        self.live.remove(worker)
        self._frontend.engine_lost(worker, now)
        for call in self._current.values():
            sequence = call.sequence
            if call.worker != worker or not isinstance(sequence, EngineSequence) or sequence.ended_at is not None:
                continue  # those that are still in its server process are lost when they leave it
            call.worker_lost = True
            if self.engines[worker].abort(sequence, now):
                self.events.at(now, self._ended, call)
        self._schedule_step(worker)

    def _schedule_step(self, worker: int) -> None:
        """Schedule the end of the engine's next step."""
        due = self.engines[worker].next_at
        if due is not None and due != self._due[worker]:
            self._due[worker] = due
            self.events.at(due, self._advance, worker)

    def _advance(self, now: float, worker: int) -> None:
        engine = self.engines[worker]
        if engine.next_at is None or engine.next_at > now:
            return  # the steps were truncated and have ended, or continue
        self._due[worker] = None
        for happened in engine.advance(now):
            call = happened.sequence.tag
            assert isinstance(call, Call)
            deliver = self._deliver_first_token if isinstance(happened, FirstTokenEvent) else self._ended
            if happened.delivered_at > now:
                self.events.at(happened.delivered_at, deliver, call)
            else:
                deliver(now, call)
        self._schedule_step(worker)

    def _deliver_first_token(self, now: float, call: Call) -> None:
        if call.state != "sent":
            return
        if call.first_at is None:
            call.first_at = now
        self._frontend.first_token(call, now)

    def _ended(self, now: float, call: Call) -> None:
        if isinstance(call.sequence, EngineSequence):
            before_s = call.produced * self._itl_s.get(call.run.lane, 0.0)
            call.late_at = max(call.late_at, call.sequence.late_s - before_s)
        self._frontend.ended(call, now)
        if call.state == "sent":
            self._finish_call(call, now, "failed" if call.worker_lost else "done")
        if call.state == "over":
            call.sequence = None  # they refer to each other: break the cycle
