"""Recordings of the Harbor load generator: every call with the time of every token.

A file holds one arm with one seed as JSON under xz. Times are whole milliseconds, rounded up: targets are whole
milliseconds too (while a server sends each token by itself), so a token is late here exactly when it was late then.
Prompts are not kept, because `inferry.sim.harbor` generates them from the seed.
"""

import lzma
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from inferry.sim.calls import Run
from inferry.sim.harbor import harbor

FORMAT = "inferry-harbor/1"
CANCELLED = "cancelled"
"""The load generator's error of a cancelled call, which is not a failure."""
_XZ_PRESET = 9 | lzma.PRESET_EXTREME


class Call(Struct, frozen=True, array_like=True):
    """One call as its client saw it. Milliseconds: `at` since the benchmark began, all others since `at`."""

    run: str
    step: str
    lane: str
    tenant: str
    at_ms: int
    planned: int
    """Requested output tokens."""
    ok: bool
    err: str | None
    out: int
    resets: int
    end_ms: int
    deltas_ms: tuple[int, ...]
    """From `at` to the first token, from that to the second, and so on."""

    @property
    def times_ms(self) -> list[int]:
        return list(accumulate(self.deltas_ms))


class Belief(Struct, frozen=True, array_like=True):
    """The capacity controller's estimated costs and the resulting capacity, about once a second."""

    at_s: float
    prefill_tokens: int
    prefill_tokens_per_s: int | None
    batch_sequences: int | None
    step_ms: float
    token_us: float
    prompt_us: float
    slack_p0_s: float | None
    slack_p1_s: float | None
    jobs: int


class Recording(Struct, frozen=True, kw_only=True):
    """One arm with one seed. `attempt` counts repetitions of the same arm and seed on one start of the engine."""

    format: str
    arm: str
    seed: int
    attempt: int
    calls: tuple[Call, ...]
    beliefs: tuple[Belief, ...] = ()

    def runs(self) -> dict[str, Run]:
        """The planned runs, by id."""
        return {run.run_id: run for run in harbor(self.seed)}


def read(path: Path) -> Recording:
    recording = msgspec.json.decode(lzma.decompress(path.read_bytes()), type=Recording)
    if recording.format != FORMAT:
        raise ValueError(f"{path} is of format {recording.format}, not {FORMAT}")
    return recording


def write(path: Path, recording: Recording) -> None:
    path.write_bytes(lzma.compress(msgspec.json.encode(recording), preset=_XZ_PRESET))


def to_recording(
    rows: Sequence[dict[str, Any]], arm: str, seed: int, attempt: int = 1, log: Iterable[str] = ()
) -> Recording:
    """A recording from the load generator's rows (`--rows`) and the gateway's debug log, if there is one."""
    runs = {run.run_id: run for run in harbor(seed)}
    # The load generator logs its own clock. A run's first call is never early, and the earliest is hardly late.
    began = min(row["at"] - runs[row["run"]].at for row in rows)
    steps_before: dict[str, int] = {}
    calls = []
    for row in rows:
        run = runs[row["run"]]
        index = steps_before.get(run.run_id, 0)
        steps_before[run.run_id] = index + 1
        if run.steps[index].name != row["step"]:
            raise ValueError(f"step {index} of {run.run_id} is no {row['step']}: another seed, or another workload")
        times_ms = [_ms(time) for time in row["times"]]
        calls.append(
            Call(
                run=run.run_id,
                step=row["step"],
                lane=row["lane"],
                tenant=row["tenant"],
                at_ms=round(1000 * (row["at"] - began)),
                planned=run.steps[index].output,
                ok=row["ok"],
                err=row["err"],
                out=row["out"],
                resets=row["resets"],
                end_ms=_ms(row["end"]),
                deltas_ms=tuple(later - earlier for earlier, later in pairwise([0, *times_ms])),
            )
        )
    return Recording(
        format=FORMAT, arm=arm, seed=seed, attempt=attempt, calls=tuple(calls), beliefs=tuple(beliefs(log))
    )


def _ms(seconds: float) -> int:
    return ceil(1000 * seconds)


_BELIEF = re.compile(
    r"(\d\d):(\d\d):(\d\d),(\d\d\d) DEBUG .* prefill_tokens=(\d+), prefill_tokens_per_s=(\S+), "
    r"batch_sequences=([^\s,)]+)(?:, direct=.*)?\), a step (\S+) ms, a token (\S+) us, a prompt token (\S+) us, "
    r"least slack P0 (\S+) P1 (\S+) .*, (\d+) jobs"
)


def beliefs(log: Iterable[str]) -> list[Belief]:
    """The estimates in a gateway's debug log of its one worker. The first line is written with the first job, which is
    when the benchmark begins.
    """
    found = [match.groups() for line in log if (match := _BELIEF.search(line))]
    at_s = [3600 * int(h) + 60 * int(m) + int(s) + int(ms) / 1000 for h, m, s, ms, *_ in found]
    return [
        Belief(
            round((at - at_s[0]) % 86_400, 1),
            int(prefill),
            None if rate == "None" else round(float(rate)),
            None if batch == "None" else int(batch),
            float(step),
            float(token),
            float(prompt),
            None if p0 == "inf" else float(p0),
            None if p1 == "inf" else float(p1),
            int(jobs),
        )
        for at, (*_, prefill, rate, batch, step, token, prompt, p0, p1, jobs) in zip(at_s, found, strict=True)
    ]


def is_abandoned(run: Run, calls: Sequence[Call]) -> bool:
    """Whether the run's agent cancelled it: such a run has no planned calls."""
    if run.cancel_after_s is None:
        return False
    if len(calls) < len(run.steps) or any(call.err == CANCELLED for call in calls):
        return True
    last = calls[-1]
    return last.at_ms - calls[0].at_ms + last.end_ms + 1000 * run.steps[-1].tool_s > 1000 * run.cancel_after_s
