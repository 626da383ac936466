"""The world in virtual time: agents that play their runs, doors that let their calls in, engines that serve them.

The world owns time, calls and engines; a door only decides when a call goes where. A call goes agent -> door ->
server process -> engine, its tokens come back, and it ends exactly once, which is when its run goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from inferry.domain.lanes import Lane
from inferry.sim.calls import Call, CallRow, Outcome, Run, RunRow
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine, First
from inferry.sim.engine import Sequence as EngineSequence
from inferry.sim.events import Events
from inferry.sim.prompts import GrowingPrompt, Piece, block_hashes, length

PRIORITIES = {Lane.P0: -10, Lane.P1: 0, Lane.P2: 10}
HashMemo = dict[tuple[int, int, tuple[Piece, ...]], tuple[int, ...]]
"""Block hashes that were computed before; worlds that play the same runs may share it."""
HARBOR_GAPS_S = {Lane.P0: 0.030, Lane.P1: 0.050, Lane.P2: 0.5}


class Door(Protocol):
    """Stands between agents and engines. It hears of a call's first token and of its end, whatever the end."""

    def open(self, world: "World") -> None: ...

    def ask(self, call: Call, now: float) -> None:
        """An agent wants the call; `world.send` it to a worker when its time has come."""

    def first(self, call: Call, now: float) -> None: ...

    def ended(self, call: Call, now: float) -> None:
        """A call that was sent is over. An evicted one may be asked for again; any other is not heard of again."""

    def withdraw(self, call: Call, now: float) -> None:
        """The agent walked away: forget the call, or `world.abort` it."""


class World:
    """Plays runs against engines behind a door. `rows` and `runs` are what came of it.

    Engines are all alike, `workers` of them, or one for each of the `flags`. With `on_call` and `on_run` rows are
    handed over as they are written and not kept, so that a world of any length needs no more room than what is under
    way in it.
    """

    def __init__(
        self,
        door: Door,
        costs: CostModel,
        flags: EngineFlags | Sequence[EngineFlags],
        *,
        workers: int = 1,
        gaps_s: Mapping[Lane, float] = HARBOR_GAPS_S,
        loses: Callable[[Call], bool] | None = None,
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
        self.rows: list[CallRow] = []
        self.runs: list[RunRow] = []
        self._on_call = on_call or self.rows.append
        self._on_run = on_run or self.runs.append
        self._door = door
        self._gaps_s = dict(gaps_s)
        self._loses = loses
        self._due: list[float | None] = [None] * len(self.engines)
        self._calls = 0
        self._current: dict[str, Call] = {}
        self._salts: dict[str, int] = {}
        self._hashes = hashes
        self._prompts: dict[str, GrowingPrompt] = {}
        door.open(self)

    def play(
        self, runs: Iterable[Run], until: float | None = None, watch: Callable[[float], None] | None = None
    ) -> None:
        """Until everything has ended. Same runs, same door: same rows, byte for byte."""
        for run in runs:
            self.events.at(run.at, self._begin_run, run)
        self.events.run(until, watch)

    def play_in_order(self, runs: Iterator[Run], watch: Callable[[float], None] | None = None) -> None:
        """As `play`, for runs that are made while they are played, earliest first: one of them is known ahead."""
        self._await(runs)
        self.events.run(None, watch)

    @property
    def busy_s(self) -> Sequence[float]:
        return [engine.busy_s for engine in self.engines]

    # Agents.

    def _await(self, runs: Iterator[Run]) -> None:
        run = next(runs, None)
        if run is not None:
            if run.at < self.events.now:
                raise ValueError(f"{run.run_id} begins before the run ahead of it")
            self.events.at(run.at, self._arrive, (run, runs))

    def _arrive(self, now: float, what: tuple[Run, Iterator[Run]]) -> None:
        run, later = what
        self._await(later)
        self._begin_run(now, run)

    def _begin_run(self, now: float, run: Run) -> None:
        if run.cancel_after_s is not None:
            self.events.at(now + run.cancel_after_s, self._walk_away, run)
        self._begin_step(now, (run, 0))

    def _begin_step(self, now: float, what: tuple[Run, int]) -> None:
        run, index = what
        if run.cancel_after_s is not None and run.run_id not in self._current and index:
            return
        self._calls += 1
        call = Call(f"{run.run_id}/{index}", self._calls, run, index, length(run.steps[index].prompt), now)
        self._current[run.run_id] = call
        self._door.ask(call, now)

    def _walk_away(self, now: float, run: Run) -> None:
        call = self._current.pop(run.run_id, None)
        if call is None:
            return
        self._prompts.pop(run.run_id, None)
        self._on_run(RunRow(run.run_id, run.lane, run.tenant, run.at, now - run.at, len(run.steps), False, True))
        if call.state != "over":
            call.cancelled = True
            self._row(call, now, "cancelled")
            self._door.withdraw(call, now)

    def _over(self, call: Call, now: float, outcome: Outcome) -> None:
        """The call ended for its agent: write it down, and let the run go on or break."""
        self._row(call, now, outcome)
        run = call.run
        if outcome == "done" and call.index + 1 < len(run.steps):
            self.events.at(now + call.step.tool_s, self._begin_step, (run, call.index + 1))
            return
        # The last tool is part of the run too.
        ended = now + (call.step.tool_s if outcome == "done" else 0.0)
        if run.cancel_after_s is not None and ended >= run.at + run.cancel_after_s:
            return  # it walks away during the tool
        self._current.pop(run.run_id, None)
        self._prompts.pop(run.run_id, None)
        self._on_run(
            RunRow(run.run_id, run.lane, run.tenant, run.at, ended - run.at, len(run.steps), outcome == "done", False)
        )

    def _row(self, call: Call, now: float, outcome: Outcome) -> None:
        call.state = "over"
        run, sequence = call.run, call.sequence
        late = cached = None
        produced = call.produced
        if isinstance(sequence, EngineSequence):
            cached = sequence.cached_tokens
            if outcome == "done":
                late = sequence.late_s - call.at
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

    # What doors do.

    def send(self, call: Call, worker: int, now: float) -> None:
        """Put the call on the wire to a worker. Requests pass its server process one after the other."""
        call.worker = worker
        if call.sent_at is None:
            call.sent_at = now
        call.state = "sent"
        if self._loses is not None and self._loses(call):
            self.events.at(now, self._reset, call)
            return
        call.turns = self.engines[worker].costs.request_turns
        self._take_turn(now, call)

    def abort(self, call: Call, now: float) -> None:
        """Close the call's connection; the door hears `ended` once the engine is rid of it."""
        sequence = call.sequence
        if not isinstance(sequence, EngineSequence):
            call.lost = True  # still in the server process, which will notice
            return
        if sequence.ended_at is not None:
            return  # complete, and the news is on its way
        assert call.worker is not None
        if self.engines[call.worker].abort(sequence, now):
            self.events.at(now, self._ended, call)
        self._watch(call.worker)

    def give_up(self, call: Call, now: float, outcome: Outcome) -> None:
        """End a call that was never sent."""
        self._over(call, now, outcome)

    # Engines.

    def _reset(self, now: float, call: Call) -> None:
        self._door.ended(call, now)
        if call.state != "over":
            self._over(call, now, "failed")

    def _take_turn(self, now: float, call: Call) -> None:
        assert call.worker is not None
        call.turns -= 1
        through_at = self.engines[call.worker].receive(call.prompt, now)
        self.events.at(through_at, self._take_turn if call.turns and not call.lost else self._enter, call)

    def _enter(self, now: float, call: Call) -> None:
        if call.lost:
            call.lost = False
            self._door.ended(call, now)
            return
        run = call.run
        assert call.worker is not None
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
            gap_s=self._gaps_s.get(run.lane),
            tag=call,
        )
        call.sequence = sequence
        engine.submit(sequence, now)
        self._watch(call.worker)

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

    def _watch(self, worker: int) -> None:
        """Be there when the engine's next step ends."""
        due = self.engines[worker].next_at
        if due is not None and due != self._due[worker]:
            self._due[worker] = due
            self.events.at(due, self._advance, worker)

    def _advance(self, now: float, worker: int) -> None:
        engine = self.engines[worker]
        if engine.next_at is None or engine.next_at > now:
            return  # the steps were cut short and have ended before, or go on
        self._due[worker] = None
        for happened in engine.advance(now):
            call = happened.sequence.tag
            assert isinstance(call, Call)
            heard = self._heard_first if isinstance(happened, First) else self._ended
            if happened.heard_at > now:
                self.events.at(happened.heard_at, heard, call)
            else:
                heard(now, call)
        self._watch(worker)

    def _heard_first(self, now: float, call: Call) -> None:
        if call.state != "sent":
            return
        if call.first_at is None:
            call.first_at = now
        self._door.first(call, now)

    def _ended(self, now: float, call: Call) -> None:
        self._door.ended(call, now)
        if call.state == "sent":
            self._over(call, now, "done")
        if call.state == "over":
            call.sequence = None  # they know each other, and nobody else knows them any more
