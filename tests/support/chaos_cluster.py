"""Seeded faults of a whole cluster under mixed load: `kill -9`, SIGSTOP and partitions of gateways, the owner, Redis,
pull-workers and engines. Afterwards every accepted durable item has one result, live calls were complete or failed with
an error, and no run has more than its ceiling. `python -m support.chaos_cluster FIRST_SEED RUNS` reports each run.
What all have shown is in benchmarks/results/chaos.json.
"""

import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from support.chaos_load import Load
from support.chaos_processes import ENGINES, GATEWAYS, PULLING, Cluster, Member, pause, resume
from support.postgres import PostgresServer
from support.seed_results import SeedResults
from support.waiting import until

WHOLE = 50
"""Runs whose results are kept as evidence."""
FAULTS = (3, 5)
WINDOW_S, LONGEST_S = 5.0, 3.0
RECOVERY_S = 10.0
PROCESSES = [
    "owner",
    "redis",
    "worker",
    *(f"gateway-{n}" for n in range(GATEWAYS)),
    *(f"engine-{n}" for n in range(ENGINES)),
]
CUTS = ["redis", "redis of worker", *(f"engine-{n}" for n in range(ENGINES))]
CUTS += [f"{what} gateway-{n}" for n in range(GATEWAYS) for what in ("redis of", "link to")]


class Fault(NamedTuple):
    """`target` is cut off, paused or killed after `at_s`, for `for_s`. `resets`: a healed connection is reset."""

    at_s: float
    for_s: float
    kind: str
    target: str
    resets: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.target} at {self.at_s:.1f} for {self.for_s:.1f}"


class Result(NamedTuple):
    """`served_s`: the longest time from when no fault was left until the next live call was complete. `recovered_s`:
    from when all faults have ended and all processes run again, until every gateway has served a live call and a new
    job. `drained_s`: until all accepted work had ended.
    """

    faults: list[Fault]
    outcomes: dict[str, int]
    most_held: int
    served_s: float
    recovered_s: float
    drained_s: float
    problems: list[str]

    def problem(self) -> str | None:
        """What went wrong; None where the run has passed."""
        found = list(dict.fromkeys(self.problems))
        if self.served_s > RECOVERY_S:
            found.append(f"no live call was complete for {self.served_s:.1f} s after a fault")
        if self.recovered_s > RECOVERY_S:
            found.append(f"not every gateway served for {self.recovered_s:.1f} s after the last fault")
        return "; ".join(found) or None


def faults_of(seed: int) -> list[Fault]:
    rng = random.Random(seed)
    found = []
    for _ in range(rng.randint(*FAULTS)):
        kind = rng.choice(["kill", "pause", "cut"])
        target = rng.choice(CUTS if kind == "cut" else PROCESSES)
        found.append(Fault(rng.uniform(0, WINDOW_S), rng.uniform(0.3, LONGEST_S), kind, target, rng.random() < 0.5))
    return sorted(found)


class Chaos:
    """Begins and ends the faults of one run, each once. `ended_at`: each time after which no fault was left."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.ended_at: list[float] = []

    def play(self, faults: list[Fault]) -> None:
        """All of them, at their times; returns when every one has ended and all processes run."""
        began = time.monotonic()
        steps: list[tuple[float, int, bool]] = []
        for number, one in enumerate(faults):
            steps += [(one.at_s, number, True), (one.at_s + one.for_s, number, False)]
        ends: dict[int, Callable[[], None]] = {}
        for at_s, number, is_begin in sorted(steps):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            if is_begin:
                ends[number] = self._begin(faults[number])
            else:
                ends.pop(number)()
                if not ends:
                    self.ended_at.append(time.monotonic())
        paths = [(one, "/health") for one in self._cluster.gateways]
        for member, path in paths + [(one, "/v1/models") for one in self._cluster.engines]:
            until(partial(member.answers, path), every_s=0.02, problem=member.log.read_text)
        worker = self._cluster.worker
        until(lambda: worker.has_said(PULLING), every_s=0.05, problem=worker.log.read_text)

    def _begin(self, fault: Fault) -> Callable[[], None]:
        """Returns what ends it. A fault may meet a target that another one has killed: then it does nothing."""
        if fault.kind == "cut":
            return self._cut(fault)
        if fault.target == "redis":
            return self._hit_redis(fault.kind)
        member = self._member(fault.target)
        if fault.kind == "kill":
            member.kill()
            return lambda: None if member.is_alive() else member.start()
        pause(member)
        return lambda: resume(member)

    def _member(self, target: str) -> Member:
        if target == "owner":
            return self._cluster.owner() or self._cluster.gateways[0]
        return next(one for one in self._cluster.members if one.name == target)

    def _cut(self, fault: Fault) -> Callable[[], None]:
        cuts = self._cluster.cuts
        chosen = [cuts[name] for name in cuts if name == fault.target or name.startswith(f"{fault.target} of ")]
        for one in chosen:
            one.cut()

        def end() -> None:
            for one in chosen:
                one.heal(resets=fault.resets)

        return end

    def _hit_redis(self, kind: str) -> Callable[[], None]:
        redis = self._cluster.redis
        if kind == "kill":
            redis.kill()
            return lambda: None if redis.is_alive else redis.start()
        redis.pause()
        return redis.resume


def run(cluster: Cluster, seed: int) -> Result:
    """One run. What it finds is in the result's `problems`; raises AssertionError where something never ends."""
    faults, chaos, load = faults_of(seed), Chaos(cluster), Load(cluster, seed)
    load.start()
    try:
        chaos.play(faults)
        began = time.monotonic()
        _recover(cluster, load, seed)
        recovered_s = time.monotonic() - began
        load.stop()
        load.await_durable(cluster.gateways[0])
        drained_s = time.monotonic() - began
        load.check_ledger(cluster.ledger)
    finally:
        load.stop()
        load.stop_sampling()
    served_s = max(min(at for at in load.complete_at if at >= end) - end for end in chaos.ended_at)
    return Result(faults, dict(load.outcomes), load.most_held, served_s, recovered_s, drained_s, load.problems)


def _recover(cluster: Cluster, load: Load, seed: int) -> None:
    """Wait until every gateway serves a live call and a new job of either kind ends."""

    def serve(number: int, gateway: Member) -> None:
        rng = random.Random(f"{seed} recovery {number}")
        until(lambda: load.call(gateway, rng, f"recovery-{number}") == "complete", every_s=0.02)
        id = load.create_job(gateway, 1000 + number)
        until(lambda: load.job(gateway, id)["status"] != "in_progress", every_s=0.02)

    threads = [threading.Thread(target=serve, args=one) for one in enumerate(cluster.gateways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_words(seed: int, found: Result, took_s: float) -> str:
    calls = ", ".join(f"{count} {how}" for how, count in sorted(found.outcomes.items()))
    problem = found.problem()
    return (
        f"seed {seed} {'FAILED' if problem else 'passed'} in {took_s:.0f} s: "
        f"{'; '.join(map(str, found.faults))}: {calls}; "
        f"at most {found.most_held} tokens of a run spent and leased; "
        f"a live call complete after {found.served_s:.1f} s, recovered after {found.recovered_s:.1f} s, "
        f"all work ended after {found.drained_s:.1f} s" + (f"\n    {problem}" if problem else "")
    )


def run_all(seeds: Iterator[int], postgres: PostgresServer, report: Callable[[str], None]) -> Iterator[Result | str]:
    """Runs on one cluster, until one fails or the seeds end; the error of a run that does not end."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="inferry-chaos-", dir="/tmp"))
        cluster = stack.enter_context(Cluster(Path(directory), postgres.database()))
        for seed in seeds:
            began = time.monotonic()
            try:
                found = run(cluster, seed)
            except Exception as error:
                report(f"seed {seed} FAILED: {'; '.join(map(str, faults_of(seed)))}: {error!r}\n{cluster.logs()}")
                yield repr(error)
                return
            report(in_words(seed, found, time.monotonic() - began))
            yield found
            if found.problem() and os.environ.get("CHAOS_LOGS"):
                report(cluster.logs())
            if found.problems:
                return  # the next run has a new cluster
        cluster.stop()


def main() -> int:
    """One line per run; the exit status says whether all held, and whether all recovered in time."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the processes of the cluster end too
    first, runs = int(sys.argv[1]), int(sys.argv[2])
    seeds, is_good, played = iter(range(first, first + runs)), True, 0
    results = SeedResults("chaos", "chaos_cluster", first, whole=WHOLE)
    with PostgresServer() as postgres:
        while played < runs:
            for found in run_all(seeds, postgres, lambda line: print(line, flush=True)):
                is_good = _keep(results, first + played, found)
                played += 1
    print(f"results: {results.path}")
    return 0 if is_good else 1


def _keep(results: SeedResults, seed: int, found: Result | str) -> bool:
    """Add a run to the results file. Returns whether all have passed."""
    faults = [re.sub(r"-\d", "", f"{one.kind} {one.target}") for one in faults_of(seed)]
    if isinstance(found, str):
        results.add(seed, problem=found, faults=faults)
    else:
        longest = {"live_call": found.served_s, "every_gateway": found.recovered_s, "all_work_ended": found.drained_s}
        results.add(seed, problem=found.problem(), faults=faults, **longest)
    return results.write()


if __name__ == "__main__":
    sys.exit(main())
